"""How much memory is left, and whether anybody waits for it: meminfo, control groups, pressure stall information.

Available memory is what the box has (`MemAvailable`) or what the tightest ancestor control group leaves, whichever is
less; both versions of control groups may be mounted at once. Every file that is absent, denied or broken leaves its own
field None.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from guards.roots import Roots

KIBIBYTE = 1024
UNLIMITED_BYTES = 1 << 62
"""Version 1 writes the largest multiple of a page for "no limit": 2^63 less 4, 16 or 64 KiB. No box has 2^62 bytes."""


@dataclass(frozen=True)
class Room:
    """Something with a limit: the box itself (path empty), or a control group."""

    path: str
    limit_bytes: int
    free_bytes: int

    @property
    def free_percent(self) -> float:
        """What it leaves of its limit; a limit of nothing leaves nothing."""
        return 100.0 * self.free_bytes / self.limit_bytes if self.limit_bytes else 0.0


@dataclass(frozen=True)
class Headroom:
    """A look at the box's memory; None: not known.

    Attributes:
        available_bytes: in the room that has the fewest left.
        tightest: the room with the smallest share left; what has few bytes left need not be it.
        some_percent, full_percent: share of the last minute in which some task, or all of them, waited for memory.
        reasons: why a field is None, for people.
    """

    available_bytes: int | None = None
    tightest: Room | None = None
    some_percent: float | None = None
    full_percent: float | None = None
    reasons: tuple[str, ...] = ()


def read_headroom(roots: Roots) -> Headroom:
    """Look now. Raises nothing."""
    reasons: list[str] = []
    meminfo = _text(roots.proc / "meminfo", reasons)
    total, available = _meminfo(meminfo, "MemTotal:"), _meminfo(meminfo, "MemAvailable:")
    rooms = limited_groups(roots, reasons)
    if total and available is not None:
        rooms.append(Room("", total, min(total, available)))
    elif meminfo:
        reasons.append("meminfo has no MemTotal or no MemAvailable")
    pressure = _text(roots.proc / "pressure" / "memory", reasons)
    return Headroom(
        min((room.free_bytes for room in rooms), default=None),
        min(rooms, key=lambda room: room.free_percent, default=None),
        _stall(pressure, "some"),
        _stall(pressure, "full"),
        tuple(reasons),
    )


def limited_groups(roots: Roots, reasons: list[str]) -> list[Room]:
    """Groups with a limit that this process is in, with all their ancestors that can be seen."""
    membership, mounts = (
        _text(roots.proc / "self" / "cgroup", reasons),
        _text(roots.proc / "self" / "mountinfo", reasons),
    )
    own = _own_groups(membership)
    groups = []
    for kind, mounted, point in _memory_mounts(mounts):
        if kind not in own:
            continue
        limit, usage = ("memory.max", "memory.current") if kind == "cgroup2" else _VERSION_1
        reclaimable = "inactive_file" if kind == "cgroup2" else "total_inactive_file"
        # recorded trees stand below `roots`; on a box both are the same
        directory = _below(roots, point)
        for path in _upwards(own[kind], mounted):
            group = _group(directory / path, str(PurePosixPath("/") / path), limit, usage, reclaimable)
            groups += [] if group is None else [group]
    return groups


_VERSION_1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")


def _own_groups(membership: str) -> dict[str, str]:
    """File system type → path of this process's group, from lines `id:controllers:path` (cgroups(7))."""
    own = {}
    for line in membership.splitlines():
        identifier, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if identifier == "0" and not controllers:
            own["cgroup2"] = path
        elif "memory" in controllers.split(","):
            own["cgroup"] = path
    return own


def _memory_mounts(mountinfo: str) -> Iterator[tuple[str, str, str]]:
    """(type, root, mount point) of the unified hierarchy and of version 1's memory controller, as in mountinfo."""
    for line in mountinfo.splitlines():
        fields, _, described = line.partition(" - ")
        before, after = fields.split(), described.split()
        if len(before) < 5 or len(after) < 3:
            continue
        if after[0] == "cgroup2" or (after[0] == "cgroup" and "memory" in after[2].split(",")):
            yield after[0], _unescaped(before[3]), _unescaped(before[4])


def _unescaped(path: str) -> str:
    """Blanks and backslashes are written as octal numbers."""
    for code, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        path = path.replace(code, character)
    return path


def _below(roots: Roots, mount_point: str) -> Path:
    """A mount point below /sys, under the given root."""
    inside = PurePosixPath(mount_point)
    return roots.sys / inside.relative_to("/sys") if inside.is_relative_to("/sys") else Path(mount_point)


def _upwards(own: str, mounted: str) -> list[str]:
    """A group and its ancestors, relative to the mount point; the group that is mounted there is the last.

    A container's mount may show a group of its host as its root, while /proc names the group either by the host's path
    or, in a namespace of its own, from the namespace on.
    """
    path = PurePosixPath(own)
    if path.is_relative_to(mounted):
        path = PurePosixPath("/") / path.relative_to(mounted)
    if ".." in path.parts:  # outside what this namespace shows
        path = PurePosixPath("/")
    return [str(each.relative_to("/")) for each in (path, *path.parents)]


def _group(directory: Path, path: str, limit_name: str, usage_name: str, reclaimable: str) -> Room | None:
    """None where the group can't be seen, or has no limit."""
    unimportant: list[str] = []
    limit = _number(_text(directory / limit_name, unimportant))
    usage = _number(_text(directory / usage_name, unimportant))
    if limit is None or usage is None or limit >= UNLIMITED_BYTES:
        return None
    # pages of files that nobody touched lately go when memory is short
    cache = 0
    for line in _text(directory / "memory.stat", unimportant).splitlines():
        name, _, number = line.partition(" ")
        if name == reclaimable:
            cache = _number(number) or 0
    return Room(path, limit, max(0, limit - usage + cache))


def _number(text: str) -> int | None:
    """A natural number; None for anything else, "max" among it."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _meminfo(text: str, name: str) -> int | None:
    for line in text.splitlines():
        if line.startswith(name):
            number = line[len(name) :].split()
            kibibytes = _number(number[0]) if number else None
            return None if kibibytes is None else kibibytes * KIBIBYTE
    return None


def _stall(text: str, kind: str) -> float | None:
    """`avg60` of a line `some avg10=0.00 avg60=0.00 avg300=0.00 total=0` (Documentation/accounting/psi.rst)."""
    for line in text.splitlines():
        words = line.split()
        if words[:1] != [kind]:
            continue
        for word in words[1:]:
            name, _, number = word.partition("=")
            if name == "avg60":
                try:
                    percent = float(number)
                except ValueError:
                    return None
                return percent if 0.0 <= percent <= 100.0 else None
    return None


def _text(path: Path, reasons: list[str]) -> str:
    """Contents of a small file; empty, with the reason added, where it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        reasons.append(f"{path}: {error.strerror or error}")
        return ""
