"""A box's disk: a sparse ext4 image, loop-mounted, the upper layer of an overlay over saved disks and the root tree."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from tests.lab.errors import LabError
from tests.lab.paths import BoxPaths
from tests.lab.processes import run, wait_until
from tests.lab.settings import BoxSettings

DISK_UPPER = "upper"
DISK_WORK = "work"
EXT4_IOC_SHUTDOWN = 0x8004587D  # _IOR('X', 125, __u32), linux/ext4.h
EXT4_GOING_FLAGS_NOLOGFLUSH = 2
SMALLEST_DISK_MIB = 32
RELEASE_DEADLINE_SECONDS = 10.0


def make_disk(image: Path, size_mib: int) -> None:
    """Make an empty disk, unless there is one. No blocks are reserved for root: full is full for everyone."""
    if image.exists():
        return
    if size_mib < SMALLEST_DISK_MIB:
        raise LabError(f"a disk of {size_mib} MiB is too small to boot from", hint=f"take {SMALLEST_DISK_MIB} or more")
    aside = image.with_suffix(".new")
    with aside.open("wb") as file:
        file.truncate(size_mib << 20)
    options = "lazy_itable_init=1,lazy_journal_init=1"
    run(["mkfs.ext4", "-q", "-F", "-m", "0", "-E", options, str(aside)])
    aside.rename(image)


def mount_image(image: Path, target: Path, *, read_only: bool = False) -> None:
    """Loop-mount an image; the kernel detaches the loop device at the last unmount."""
    run(["mount", "-o", "loop,ro" if read_only else "loop", str(image), str(target)])


def mount_root(box: BoxPaths, settings: BoxSettings) -> None:
    """Mount the box's root at `box.mounted_root`; its own disk is mounted already.

    `redirect_dir` lets a directory of a lower layer be renamed, which would fail with EXDEV otherwise.
    """
    lower: list[str] = []
    for index, image in enumerate(settings.layers):
        layer = box.mounted_layer(index)
        layer.mkdir(parents=True, exist_ok=True)
        mount_image(Path(image), layer, read_only=True)
        lower.append(str(layer / DISK_UPPER))
    disk = box.mounted_disk
    options = f"lowerdir={':'.join([*lower, settings.tree])},upperdir={disk / DISK_UPPER},workdir={disk / DISK_WORK}"
    box.mounted_root.mkdir(parents=True, exist_ok=True)
    run(["mount", "-t", "overlay", "overlay", "-o", f"{options},redirect_dir=on", str(box.mounted_root)])


def lose_power(mounted_disk: Path) -> None:
    """Stop the disk as a power cut does: what had not reached it is gone, its journal is not flushed."""
    descriptor = os.open(mounted_disk, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, struct.pack("I", EXT4_GOING_FLAGS_NOLOGFLUSH))
    finally:
        os.close(descriptor)


def wait_released(image: Path, box: str) -> None:
    """Wait until no loop device holds the image, i.e. it is unmounted everywhere."""

    def released() -> bool:
        for file in Path("/sys/block").glob("loop*/loop/backing_file"):
            try:
                if file.read_text(encoding="utf-8", errors="replace").rstrip("\n") == str(image):
                    return False
            except OSError:  # detached while we looked
                continue
        return True

    wait_until(released, f"{box}: unmount of its disk", RELEASE_DEADLINE_SECONDS)
