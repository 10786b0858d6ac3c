"""What travels to a box: its desired state without the contents, and the contents that it asks for."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fleet.errors import FleetError
from fleet.provision.agent.wire import MAX_BODY_BYTES, Message
from fleet.provision.desired import Content, DesiredState
from fleet.provision.diff import Changes

WORTH_COMPRESSING = 0.8  # of the first chunk's size; wheels and weights stay above it


def spec_json(desired: DesiredState) -> dict[str, Any]:
    """The desired state as the agent gets it: everything but the contents, which travel only when they differ."""

    def bare(value: Any) -> Any:
        if isinstance(value, dict):
            flat = {key: bare(item) for key, item in value.items() if key not in ("content", "data", "file")}
            content = value.get("content")
            return flat | {key: content[key] for key in ("sha256", "size_bytes")} if content else flat
        return [bare(item) for item in value] if isinstance(value, list | tuple) else value

    spec: dict[str, Any] = bare(asdict(desired))
    for environment, wanted in zip(spec["environments"], desired.environments, strict=True):
        environment["wheels"] = [
            {"name": name, "sha256": content.sha256, "size_bytes": content.size_bytes}
            for name, content in wanted.wheels
        ]
    return spec


def contents_of(desired: DesiredState) -> dict[str, Content]:
    """Every content of a desired state by digest."""
    files = [*desired.files, *(file for tree in desired.trees for file in tree.files)]
    contents = [file.content for file in files]
    for environment in desired.environments:
        contents += [environment.uv, *(wheel for _, wheel in environment.wheels)]
    return {content.sha256: content for content in contents}


def files_to_send(desired: DesiredState, changes: Changes) -> tuple[Content, ...]:
    """Contents that changes may need and that come from files of the bundle. Pure.

    A damaged file of an environment counts as all of its wheels: which one holds the file is known on the box.
    """
    paths = {change.path for change in changes if change.bytes_to_send or change.kind == "tree"}
    damaged = [change.path for change in changes if change.kind == "environment-file"]
    contents = [file.content for file in desired.files if file.path in paths]
    for tree in desired.trees:
        contents += [file.content for file in tree.files if tree.path in paths or file.path in paths]
    for environment in desired.environments:
        inside = f"{environment.path}/"
        if environment.path in paths or any(path.startswith(inside) for path in damaged):
            contents += [environment.uv, *(wheel for _, wheel in environment.wheels)]
    return tuple(content for content in contents if content.file is not None)


def chunks(content: Content) -> Iterator[tuple[Message, bytes]]:
    """A content as chunk messages; whether it is compressed is decided by its first chunk.

    Raises:
        FleetError: the bundle's file can't be read.
    """
    compress: bool | None = None
    left = content.size_bytes
    for raw in _raw_chunks(content):
        left -= len(raw)
        packed = zlib.compress(raw, 1) if compress is not False else raw
        if compress is None:
            compress = len(packed) < WORTH_COMPRESSING * len(raw)
        body = packed if compress else raw
        yield {"op": "chunk", "zlib": compress, "last": left <= 0, "bytes": len(raw)}, body
        if left <= 0:  # a file that grew is refused by the box, for its size
            return
    if left > 0 or content.size_bytes == 0:
        yield {"op": "chunk", "zlib": False, "last": True, "bytes": 0}, b""


def _raw_chunks(content: Content) -> Iterator[bytes]:
    chunk_bytes = MAX_BODY_BYTES // 2  # compressed bytes that do not compress are a little longer
    if content.data is not None:
        for start in range(0, len(content.data), chunk_bytes):
            yield content.data[start : start + chunk_bytes]
        return
    try:
        with Path(str(content.file)).open("rb") as file:
            while chunk := file.read(chunk_bytes):
                yield chunk
    except OSError as error:
        raise FleetError(
            f"{content.file}: {error.strerror}, expected a file of the bundle", hint="fleet bundle"
        ) from error
