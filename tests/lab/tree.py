"""A box's file tree as data, so that a test can say what a command changed and what it left alone."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

READ_BYTES = 1 << 20
ALWAYS_LEFT_OUT = frozenset(
    {
        "/proc", "/sys", "/dev", "/run", "/tmp", "/var/log",
        "/var/lib/lastlog", "/var/lib/wtmpdb",  # login records; the older ones are in /var/log and /run
        "/var/lib/systemd/random-seed", "/var/lib/systemd/linger",
    }
)  # fmt: skip

PER_BOOT_PREFIX = "/var/tmp/systemd-private-"  # the /tmp of services with PrivateTmp, another name at each boot


@dataclass(frozen=True)
class Entry:
    """One path.

    Attributes:
        mode: type and permission bits (`st_mode`).
        user, group: numbers of the owner.
        size: bytes; 0 for directories, whose size depends on their history.
        content: SHA-256 of a file's bytes, a link's target, or empty.
        inode, changed_ns: number and change time (nanoseconds); left out of `==`, because a tree may be equal
            although a file was written again. Compare them where that matters.
    """

    mode: int
    user: int
    group: int
    size: int
    content: str
    inode: int = field(compare=False)
    changed_ns: int = field(compare=False)


def read_tree(root: Path, *, leave_out: Collection[str] = ()) -> dict[str, Entry]:
    """Entries of everything below `root`, keyed by absolute path in the box.

    Args:
        root: the box's root as the host sees it.
        leave_out: absolute paths in the box that are skipped with all that is below them.
    """
    skipped = ALWAYS_LEFT_OUT.union(leave_out)
    entries: dict[str, Entry] = {}
    pending = [""]
    while pending:
        directory = pending.pop()
        with os.scandir(f"{root}{directory}/") as children:
            for child in children:
                path = f"{directory}/{child.name}"
                if path in skipped or path.startswith(PER_BOOT_PREFIX):
                    continue
                try:
                    entries[path] = read_entry(child)
                except FileNotFoundError:  # removed while we looked
                    continue
                if child.is_dir(follow_symlinks=False):
                    pending.append(path)
    return entries


def read_entry(child: os.DirEntry[str]) -> Entry:
    """One path's entry.

    Raises:
        FileNotFoundError: it has gone.
    """
    status = child.stat(follow_symlinks=False)
    size, content = status.st_size, ""
    if stat.S_ISREG(status.st_mode):
        content = _file_digest(child.path)
    elif stat.S_ISLNK(status.st_mode):
        content = str(Path(child.path).readlink())
    else:
        size = 0
    return Entry(status.st_mode, status.st_uid, status.st_gid, size, content, status.st_ino, status.st_ctime_ns)


def _file_digest(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:  # noqa: PTH123 (tens of thousands of files; a Path each costs seconds)
        while block := file.read(READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def changed_paths(before: dict[str, Entry], after: dict[str, Entry]) -> dict[str, str]:
    """Path -> `added`, `removed` or `changed` (mode, owner, size or content)."""
    changes = {path: "removed" for path in before.keys() - after.keys()}
    changes.update({path: "added" for path in after.keys() - before.keys()})
    changes.update({path: "changed" for path in before.keys() & after.keys() if before[path] != after[path]})
    return changes


def rewritten_paths(before: dict[str, Entry], after: dict[str, Entry]) -> set[str]:
    """Paths in both trees whose inode or change time differs, i.e. that someone touched."""

    def identity(entry: Entry) -> tuple[int, int]:
        return entry.inode, entry.changed_ns

    return {path for path in before.keys() & after.keys() if identity(before[path]) != identity(after[path])}
