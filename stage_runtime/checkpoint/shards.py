"""Shards: checked against the manifest, then mapped (layers) or read row by row (embedding)."""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fleet.errors import FleetError
from stage_runtime.checkpoint.manifest import PROVISION_HINT, FileEntry

HASH_BLOCK_BYTES = 1024 * 1024
SAFETENSORS_HEADER_BYTES = 100 * 1024 * 1024  # the format's own limit
TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def verify_file(directory: Path, entry: FileEntry) -> Path:
    """Check size and SHA-256; the bytes stay in the page cache, so mapping them reads nothing twice.

    Returns:
        The file's path.

    Raises:
        FleetError: missing, of another size or digest; names the file and both values.
    """
    path = directory / entry.name
    try:
        with path.open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            if size != entry.bytes:
                raise FleetError(f"{path}: {size} bytes, expected {entry.bytes}", hint=PROVISION_HINT)
            digest = hashlib.sha256()
            while block := file.read(HASH_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise FleetError(f"{path}: {error.strerror}", hint=PROVISION_HINT) from None
    if digest.hexdigest() != entry.sha256:
        raise FleetError(
            f"{path}: SHA-256 is {digest.hexdigest()}, expected {entry.sha256}: the file is damaged",
            hint=PROVISION_HINT,
        )
    return path


class Shard:
    """An open, mapped safetensors file; tensors share the mapping and keep it alive."""

    def __init__(self, path: Path, file: Any) -> None:
        self._path = path
        self._file = file
        self._names = frozenset(file.keys())

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """A mapped tensor.

        Raises:
            FleetError: missing, or of another shape or an unknown dtype.
        """
        if name not in self._names:
            raise FleetError(f"{self._path}: no tensor {name}", hint="run `fleet bundle` again")
        tensor: torch.Tensor = self._file.get_tensor(name)
        if tuple(tensor.shape) != shape or tensor.dtype not in TORCH_DTYPES.values():
            raise FleetError(
                f"{self._path}: {name} is {tensor.dtype} of shape {tuple(tensor.shape)}, expected shape {shape}",
                hint="run `fleet bundle` again",
            )
        return tensor


@contextmanager
def open_shard(directory: Path, entry: FileEntry) -> Iterator[Shard]:
    """Verify a shard and map it.

    Raises:
        FleetError: see `verify_file`; or no safetensors file.
    """
    path = verify_file(directory, entry)
    try:
        with safe_open(path, framework="pt") as file:
            yield Shard(path, file)
    except SafetensorError as error:
        raise FleetError(f"{path}: {error}", hint="run `fleet bundle` again") from None


@dataclass(frozen=True)
class RowReader:
    """Rows of a matrix straight from its file (safetensors layout: u64 header length, JSON header, raw data;
    https://github.com/huggingface/safetensors#format).

    A mapped embedding would count its touched pages in the process' memory beside the packed head made from the same
    bytes; rows read on demand live in the page cache alone, so a stage holds its weights once.

    Attributes:
        descriptor: open file; belongs to this object and is closed with it.
        offset: of row 0 in the file, bytes.
        rows, columns: shape.
        dtype: of the stored values.
    """

    descriptor: int
    offset: int
    rows: int
    columns: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        # engines of two epochs may share it, so nobody but the last user can close it
        weakref.finalize(self, os.close, self.descriptor)

    def read(self, indices: list[int]) -> torch.Tensor:
        """Rows as FP32, shape [len(indices), columns].

        Raises:
            OSError: the file can't be read any more.
        """
        size = self.columns * self.dtype.itemsize
        data = bytearray().join(os.pread(self.descriptor, size, self.offset + index * size) for index in indices)
        return torch.frombuffer(data, dtype=self.dtype).view(len(indices), self.columns).float()


def open_rows(path: Path, name: str, shape: tuple[int, int]) -> RowReader:
    """Find a matrix in a verified safetensors file for reading by rows.

    Raises:
        FleetError: no such tensor, or another shape or dtype than expected.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    header_bytes = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if header_bytes > SAFETENSORS_HEADER_BYTES:
        os.close(descriptor)
        raise FleetError(f"{path}: safetensors header of {header_bytes} bytes", hint="run `fleet bundle` again")
    header = json.loads(os.pread(descriptor, header_bytes, 8))
    entry = header.get(name)
    if entry is None or tuple(entry["shape"]) != shape or entry["dtype"] not in TORCH_DTYPES:
        os.close(descriptor)
        raise FleetError(f"{path}: {name} is {entry}, expected shape {shape}", hint="run `fleet bundle` again")
    offset = 8 + header_bytes + int(entry["data_offsets"][0])
    return RowReader(descriptor, offset, *shape, TORCH_DTYPES[entry["dtype"]])
