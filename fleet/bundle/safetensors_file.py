"""The safetensors format, byte for byte: headers are read and tensors streamed without a framework.

`safetensors`' own Python functions hold a whole file in memory and have no numpy type for BF16, so bytes are copied
here; `safetensors.safe_open` still judges every file that is read. Format: 8 bytes little-endian header length, JSON
header, tensor bytes (https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from fleet.bundle.source_model import DTYPE_BYTES, SourceTensor
from fleet.errors import FleetError

HEADER_ALIGNMENT_BYTES = 64
"""Tensor bytes start at a multiple of it, so that a mapped file is aligned for vector loads."""


def read_safetensors(path: Path) -> dict[str, SourceTensor]:
    """The tensors of a file, unread; their bytes are mapped when asked for.

    Raises:
        FleetError: not a safetensors file, or a truncated one.
    """
    try:
        with safe_open(path, framework="np"):  # checks header, offsets and the file's length
            pass
    except (SafetensorError, OSError) as error:
        raise FleetError(
            f"{path} is not a whole safetensors file: {error}", hint="copy the model again; the file is damaged"
        ) from error
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    start = 8 + header_bytes
    return {name: _mapped_tensor(path, start, entry) for name, entry in header.items()}


def _mapped_tensor(path: Path, start: int, entry: dict[str, list[int] | str]) -> SourceTensor:
    begin, end = (int(offset) for offset in entry["data_offsets"])

    def read() -> memoryview:
        if end == begin:  # an empty range cannot be mapped
            return memoryview(b"")
        return np.memmap(path, np.uint8, "r", offset=start + begin, shape=(end - begin,)).data

    return SourceTensor(str(entry["dtype"]), tuple(int(size) for size in entry["shape"]), read)


def write_safetensors(path: Path, tensors: Mapping[str, SourceTensor]) -> tuple[str, int]:
    """Write tensors to `path` one at a time, aside first, then rename; the caller makes the whole directory durable.

    Order is by dtype size (widest first, so that each tensor stays aligned), then by name: equal input, equal bytes.

    Returns:
        SHA-256 (hex) and size in bytes of the file.
    """
    names = sorted(tensors, key=lambda name: (-DTYPE_BYTES[tensors[name].dtype], name))
    header: dict[str, object] = {}
    offset = 0
    for name in names:
        tensor = tensors[name]
        size = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, offset + size]}
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % HEADER_ALIGNMENT_BYTES)

    digest = hashlib.sha256()
    aside = path.with_name(f".{path.name}.part")
    with aside.open("wb") as file:
        for piece in (len(encoded).to_bytes(8, "little"), encoded):
            digest.update(piece)
            file.write(piece)
        for name in names:
            data = tensors[name].read()
            digest.update(data)
            file.write(data)
    aside.replace(path)
    return digest.hexdigest(), 8 + len(encoded) + offset
