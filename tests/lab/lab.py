"""The lab: a switch and named boxes, from one root tree."""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from tests.lab import network, packages, partition
from tests.lab.errors import LabError, LabTimeoutError, require_root
from tests.lab.faults import BoxFaults
from tests.lab.paths import RUNTIME, LabPaths, standard_names
from tests.lab.power import BoxPower
from tests.lab.processes import run
from tests.lab.root_tree import root_tree
from tests.lab.settings import DEFAULT_DISK_MIB, BoxSettings
from tests.lab.views import BoxViews

LOCK_DEADLINE_SECONDS = 300.0
LOCK_LINE_SECONDS = 5.0
PARALLEL_BOXES = 8
OWNER_FILE = RUNTIME / "owner.json"
LOCK_FILE = RUNTIME / "lock"
TOOLS = ("systemd-nspawn", "mmdebstrap", "ethtool", "nsenter", "unshare", "mkfs.ext4", "ssh", "ssh-keygen", "ip", "nft")


class LabBox(BoxFaults, BoxViews, BoxPower):
    """A real box: full systemd, sshd, journal, a disk and an address of its own. Made by `Lab.box`."""

    def recover(self) -> None:
        """End every fault and be on, sshd answering. Files and services are left as they are."""
        self.end_faults()
        self.on()


class Lab:
    """All boxes of one state directory. As a context manager it is down at the end.

    >>> with Lab() as lab:                                  # doctest: +SKIP
    ...     lab.up(3)                                       # box1, box2, box3 and control
    ...     lab.box("box2").power_cut()

    Args:
        paths: where state is kept; `build/lab` of this checkout by default.
    """

    def __init__(self, paths: LabPaths | None = None) -> None:
        require_root("the lab")
        self.paths = paths or LabPaths()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.down()

    def box(self, name: str) -> LabBox:
        """The box of that name, on or off.

        Raises:
            LabError: no box can be called that.
        """
        return LabBox(self.paths, name)

    @property
    def boxes(self) -> list[LabBox]:
        """All boxes that the lab has, on or off, by name."""
        if not self.paths.boxes.is_dir():
            return []
        return [self.box(directory.name) for directory in sorted(self.paths.boxes.iterdir())]

    def up(self, boxes: int | Sequence[str], *, disk_mib: int = DEFAULT_DISK_MIB) -> list[LabBox]:
        """Switch boxes on, new ones with an empty disk, and return when sshd answers on each.

        Args:
            boxes: names, or the number of stage boxes, to which `control` is added.
            disk_mib: size of new disks in MiB.

        Raises:
            LabError: a tool is missing, another checkout's lab runs, or a box does not start.
            LabTimeoutError: a named step took too long.
        """
        wanted = [self.box(name) for name in (standard_names(boxes) if isinstance(boxes, int) else boxes)]
        check_tools()
        with _locked():
            self._claim()
            tree = root_tree()
            self._make_keys(wanted)
            network.switch_up()
            for box in wanted:
                if not box.paths.settings.exists():
                    BoxSettings(disk_mib=disk_mib, tree=str(tree)).save(box.paths.settings)
            _all(wanted, lambda box: box.on(wait=False))
        _all(wanted, lambda box: box.wait_for_ssh())
        return wanted

    def down(self, *, keep_disks: bool = False) -> None:
        """End every box and remove the network. Disks and saved images go too, unless `keep_disks`.

        Works from whatever an earlier, crashed run has left. Host keys and the operator's key stay.
        """
        with _locked():
            _all(self.boxes, lambda box: box.kill())
            network.switch_down()
            if not keep_disks:
                for directory in (self.paths.boxes, self.paths.saved):
                    shutil.rmtree(directory, ignore_errors=True)
            if _owner() == str(self.paths.state):
                OWNER_FILE.unlink(missing_ok=True)

    def renew(self) -> None:
        """Give every box an empty disk: switched on, without faults, with nothing provisioned. Host keys stay."""

        def start_over(box: LabBox) -> None:
            box.kill()
            box.renew_disk()
            box.recover()
            box.wait_until_booted()

        self.heal()
        _all(self.boxes, start_over)

    def remove(self, name: str) -> None:
        """Take a box out of the lab: end it and forget its disk."""
        box = self.box(name)
        box.kill()
        shutil.rmtree(box.paths.directory, ignore_errors=True)

    def partition(self, *groups: Collection[str]) -> None:
        """Members of different groups no longer hear each other; links stay up, whoever is in no group hears all.

        Members are box names and `partition.HOST`. Replaces an earlier partition or loss; `heal` ends it.
        """
        partition.apply_rules(partition.partition_rules(groups))

    def lose_one_way(self, source: str, target: str, loss: float) -> None:
        """Lose frames from `source` to `target` with that probability; the way back is whole. `heal` ends it."""
        partition.apply_rules([partition.drop_rule(source, target, loss)])

    def heal(self) -> None:
        """End any partition and one-way loss; cut links stay cut (`LabBox.link_heal`)."""
        partition.apply_rules([])

    def save(self, name: str) -> None:
        """Keep the disks of all boxes as image `name`; boxes that were on are on again afterwards.

        Quick: each disk becomes a read-only layer, and the box goes on upon an empty disk over it.

        Raises:
            LabError: there is such an image already.
        """
        target = self._image(name)
        if target.exists():
            raise LabError(f"an image {name!r} is there already", hint=f"remove {target} or take another name")
        boxes = self.boxes
        were_on = [box for box in boxes if box.is_on]
        _all(were_on, lambda box: box.off())
        aside = target.with_name(target.name + ".new")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        for box in boxes:
            settings = box.settings
            layers = settings.layers
            if box.paths.disk.exists():
                box.paths.disk.rename(aside / f"{box.name}.img")
                layers = [str(target / f"{box.name}.img"), *layers]
            (aside / f"{box.name}.json").write_text(json.dumps(layers), encoding="utf-8")
            settings.layers = layers
            settings.save(box.paths.settings)
        aside.rename(target)
        _all(were_on, lambda box: box.on())

    def restore(self, name: str) -> None:
        """Put all boxes of image `name` back to what they were at `save`, and switch them on.

        Clean shutdown is not waited for: what the boxes did since is thrown away.

        Raises:
            LabError: there is no such image.
        """
        image = self._image(name)
        if not image.is_dir():
            known = sorted(path.name for path in self.paths.saved.glob("*")) or ["none"]
            raise LabError(f"there is no image {name!r}", hint=f"images: {', '.join(known)}")
        boxes = [self.box(file.stem) for file in sorted(image.glob("*.json"))]

        def put_back(box: LabBox) -> None:
            box.kill()
            settings = box.settings
            settings.layers = json.loads((image / f"{box.name}.json").read_text(encoding="utf-8"))
            settings.link_cut, settings.shape = False, None
            settings.save(box.paths.settings)
            box.paths.disk.unlink(missing_ok=True)
            box.on()

        _all(boxes, put_back)

    def has_image(self, name: str) -> bool:
        """Whether `save(name)` was done in this lab."""
        return self._image(name).is_dir()

    def _image(self, name: str) -> Path:
        if not name.replace("-", "").isalnum():
            raise LabError(f"{name!r} is no name for an image", hint="use letters, digits and dashes")
        return self.paths.saved / name

    def _claim(self) -> None:
        """Names of namespaces and addresses are the machine's, so two labs cannot run at once."""
        owner = _owner()
        mine = str(self.paths.state)
        if owner and owner != mine:
            other = [box.name for box in Lab(LabPaths(Path(owner))).boxes if box.is_on]
            if other:
                raise LabError(
                    f"another lab runs on this machine: {', '.join(other)}, state in {owner}",
                    hint="run there: python -m tests.lab down",
                )
            Lab(LabPaths(Path(owner)))._forget_network()
        OWNER_FILE.write_text(json.dumps({"state": mine}), encoding="utf-8")

    def _forget_network(self) -> None:
        for box in self.boxes:
            box.kill()
        network.switch_down()

    def _make_keys(self, boxes: Sequence[LabBox]) -> None:
        self.paths.host_keys.mkdir(parents=True, exist_ok=True)
        _make_key(self.paths.private_key, "fleet-lab")
        for box in boxes:
            _make_key(self.paths.host_keys / box.name, box.name)
        lines = []
        for public in sorted(self.paths.host_keys.glob("*.pub")):
            kind, key, *_ = public.read_text(encoding="ascii").split()
            lines.append(f"{self.box(public.stem).address} {kind} {key}\n")
        self.paths.known_hosts.write_text("".join(lines), encoding="ascii")


def check_tools() -> None:
    """Raise a LabError that names the missing tools, if any."""
    absent = [tool for tool in TOOLS if shutil.which(tool) is None]
    if absent:
        raise LabError(
            f"not installed: {', '.join(absent)}",
            hint=f"run: python -m tests.lab.packages (installs what {packages.PACKAGE_LIST.name} lists)",
        )


def _make_key(file: Path, comment: str) -> None:
    if not file.exists():
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(file)])


def _owner() -> str:
    try:
        return str(json.loads(OWNER_FILE.read_text(encoding="utf-8"))["state"])
    except (FileNotFoundError, ValueError, KeyError):
        return ""


def _all(boxes: Sequence[LabBox], work: Callable[[LabBox], None]) -> None:
    """Do `work` for all boxes at once; every box is tried, then the first error is raised."""
    with ThreadPoolExecutor(max_workers=PARALLEL_BOXES) as pool:
        futures = [pool.submit(work, box) for box in boxes]
    for future in futures:
        future.result()


@contextmanager
def _locked() -> Iterator[None]:
    """One `up` or `down` at a time on this machine."""
    RUNTIME.mkdir(parents=True, exist_ok=True)
    with LOCK_FILE.open("w", encoding="ascii") as lock:
        began = time.monotonic()
        next_line = began + LOCK_LINE_SECONDS
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                now = time.monotonic()
            if now - began > LOCK_DEADLINE_SECONDS:
                raise LabTimeoutError(f"another process holds {LOCK_FILE} for {LOCK_DEADLINE_SECONDS:g} s")
            if now > next_line:
                print("lab: waiting for another process that works on the lab", file=sys.stderr, flush=True)
                next_line += LOCK_LINE_SECONDS
            time.sleep(0.1)
        yield
