"""Files on disks that lose power: written aside, synced, renamed, the directory synced. Also how they are read."""

from __future__ import annotations

import contextlib
import ctypes
import grp
import hashlib
import os
import pwd
import shutil
import stat
from collections.abc import Iterable
from typing import Any

READ_BYTES = 1024 * 1024
NEW_SUFFIX = ".fleet-new"  # a file being written, beside its final name; always overwritten, so none is left for long
_libc = ctypes.CDLL(None, use_errno=True)


def open_quietly(path: str) -> int:
    """Open for reading without following a link and, where allowed, without touching the access time."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        return os.open(path, flags | getattr(os, "O_NOATIME", 0))
    except PermissionError:  # O_NOATIME belongs to the owner
        return os.open(path, flags)


def sha256_of(path: str) -> str:
    """Hex digest of a regular file."""
    digest = hashlib.sha256()
    with open(open_quietly(path), "rb", buffering=0) as file:
        while chunk := file.read(READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def user_name(uid: int) -> str:
    """Name of a user, or its number as text."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Name of a group, or its number as text."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def path_fact(path: str) -> dict[str, Any]:
    """What lies at a path, in the shape of `fleet.provision.facts.PathFact`."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"kind": "missing"}
    fact: dict[str, Any] = {
        "mode": stat.S_IMODE(status.st_mode),
        "owner": user_name(status.st_uid),
        "group": group_name(status.st_gid),
    }
    if stat.S_ISREG(status.st_mode):
        return fact | {"kind": "file", "size_bytes": status.st_size, "sha256": sha256_of(path)}
    if stat.S_ISDIR(status.st_mode):
        return fact | {"kind": "directory"}
    if stat.S_ISLNK(status.st_mode):
        return fact | {"kind": "link", "target": os.readlink(path)}
    return fact | {"kind": "other"}


def sync_directory(path: str) -> None:
    """Make renames in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file_system(path: str) -> None:
    """syncfs(2) of the file system that holds a directory: one sync for a whole tree."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(descriptor)


def remove(path: str) -> None:
    """Remove whatever lies at a path, if anything does."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISDIR(status.st_mode):
        shutil.rmtree(path)
    else:
        os.unlink(path)


class Ownership:
    """Sets modes and owners; owners only when the agent is privileged."""

    def __init__(self, privileged: bool) -> None:
        self.privileged = privileged

    def set(self, path: str, mode: int, owner: str, group: str) -> None:
        """Mode and owner of a file or directory; a link is refused (OSError), because the service user can make links
        in its own directories that point anywhere."""
        descriptor = open_quietly(path)
        try:
            self.set_open(descriptor, mode, owner, group)
        finally:
            os.close(descriptor)

    def set_open(self, descriptor: int, mode: int, owner: str, group: str) -> None:
        """The same for an open file; owner first, because chown clears set-id bits."""
        if self.privileged:
            os.fchown(descriptor, pwd.getpwnam(owner).pw_uid, grp.getgrnam(group).gr_gid)
        os.fchmod(descriptor, mode)


def make_parents(path: str) -> None:
    """Directories above a path, 0755, the new ones synced into their parents."""
    parent = os.path.dirname(path)
    missing = []
    while not os.path.isdir(parent):
        missing.append(parent)
        parent = os.path.dirname(parent)
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):  # a box beside this one (local mode) was faster
            os.mkdir(directory, 0o755)
        sync_directory(os.path.dirname(directory))


def write_aside(path: str, chunks: Iterable[bytes], ownership: Ownership, spec: dict[str, Any], *, sync: bool) -> None:
    """Write a file under its aside name and rename it to `path`; never visible half-written.

    Args:
        spec: {"mode", "owner", "group"}.
        sync: fsync the file and its directory; a tree that is synced as a whole later says False.
    """
    aside = path + NEW_SUFFIX
    remove(aside)
    descriptor = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb", buffering=0) as file:
        for chunk in chunks:
            view = memoryview(chunk)
            while view:
                view = view[file.write(view) :]
        ownership.set_open(file.fileno(), spec["mode"], spec["owner"], spec["group"])
        if sync:
            os.fsync(file.fileno())
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    os.rename(aside, path)
    if sync:
        sync_directory(os.path.dirname(path))


def switch_link(path: str, target: str) -> None:
    """Point a symbolic link elsewhere, atomically and durably."""
    aside = path + NEW_SUFFIX
    remove(aside)
    os.symlink(target, aside)
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    os.rename(aside, path)
    sync_directory(os.path.dirname(path))
