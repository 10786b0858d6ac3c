"""Files of a bundle: digests, atomic writes, free space, and a word when a step stays quiet."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from fleet.errors import FleetError

COPY_CHUNK_BYTES = 1 << 20
QUIET_SECONDS = 5.0
"""A step without output for so long says what it waits for."""

Report = Callable[[str], None]
"""Takes one line of progress."""


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, hex, read in chunks of `COPY_CHUNK_BYTES`."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(COPY_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def sha256_bytes(data: bytes) -> str:
    """SHA-256 of bytes, hex."""
    return hashlib.sha256(data).hexdigest()


def canonical_json(data: object) -> bytes:
    """JSON with sorted keys and no spaces: equal data has equal bytes, so its digest can name it."""
    return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def fsync_tree(directory: Path) -> None:
    """Make a flat directory's files and names durable, before it is renamed into place."""
    for path in directory.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    fsync_directory(directory)


def fsync_directory(path: Path) -> None:
    """Make renames inside a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes) -> None:
    """Write aside and rename: readers never see half a file. Not durable; what a run can make again may use it."""
    aside = path.with_name(f".{path.name}.part")
    aside.write_bytes(data)
    aside.replace(path)


def write_atomically(path: Path, data: bytes) -> None:
    """Write aside, fsync, rename, fsync the directory: after a power cut the file is whole or as before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    with aside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(path)
    fsync_directory(path.parent)


def copy_atomically(source: Path, target: Path) -> None:
    """Copy a file's bytes to `target` as `write_atomically` would, in chunks."""
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".{target.name}.part")
    with source.open("rb") as reader, aside.open("wb") as writer:
        shutil.copyfileobj(reader, writer, COPY_CHUNK_BYTES)
        writer.flush()
        os.fsync(writer.fileno())
    aside.replace(target)
    fsync_directory(target.parent)


def require_free_space(directory: Path, needed_bytes: int, what: str) -> None:
    """Refuse to start what the disk cannot hold.

    Raises:
        FleetError: fewer than `needed_bytes` are free where `directory` is.
    """
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < needed_bytes:
        raise FleetError(
            f"{what} needs {size_text(needed_bytes)} of disk, but {directory} has {size_text(free_bytes)} free",
            hint="free some space, or set bundle_dir (or --output) to a larger disk",
        )


def size_text(size_bytes: int) -> str:
    """Bytes for people, e.g. "98.4 MB" (powers of ten, as disks and downloads are sold)."""
    value = float(size_bytes)
    for unit in ("B", "kB", "MB"):
        if value < 1000:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


@contextlib.contextmanager
def saying_when_quiet(report: Report, waiting_for: str, quiet_seconds: float = QUIET_SECONDS) -> Iterator[None]:
    """While the block runs, report every `quiet_seconds` what it waits for."""
    done = threading.Event()

    def tell() -> None:
        waited_seconds = 0.0
        while not done.wait(quiet_seconds):
            waited_seconds += quiet_seconds
            report(f"  … still {waiting_for} ({waited_seconds:.0f} s)")

    thread = threading.Thread(target=tell, name="quiet-step", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class DigestCache:
    """Remembers digests of files that have not changed since (size, mtime in ns, inode), so that a second run is fast.

    The judgement is `make`'s and git's: whoever edits a file without changing any of the three is not found here,
    but on the box, where every file is verified.
    """

    def __init__(self, store: Path) -> None:
        self._store = store
        self._entries: dict[str, list[object]] = {}
        if store.exists():
            with contextlib.suppress(ValueError):  # a damaged cache only costs time
                loaded = json.loads(store.read_bytes())
                self._entries = loaded if isinstance(loaded, dict) else {}

    def sha256(self, path: Path) -> str:
        """SHA-256 of a file, hex; read only if the file changed since the last time."""
        stat = path.stat()
        stamp: list[object] = [stat.st_size, stat.st_mtime_ns, stat.st_ino]
        known = self._entries.get(str(path))
        if isinstance(known, list) and known[:-1] == stamp:
            return str(known[-1])
        digest = sha256_file(path)
        self._entries[str(path)] = [*stamp, digest]
        return digest

    def save(self) -> None:
        """Keep what is known for the next run; files that are gone are forgotten."""
        kept = {path: entry for path, entry in self._entries.items() if Path(path).exists()}
        write_atomically(self._store, canonical_json(kept))
