"""What the lab remembers of a box between commands: its disk, layers, cable and cgroups."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from tests.lab.errors import LabError

DEFAULT_DISK_MIB = 4096


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a cable does to frames, in each direction alike.

    Attributes:
        delay_ms: added one way, in milliseconds.
        jitter_ms: uniform deviation of the delay, +- milliseconds; frames may overtake each other.
        loss: probability 0 to 1 that a frame vanishes.
        rate_mbit: megabits a second, 0 for no limit. The wire itself tops out near 400.
    """

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    rate_mbit: float = 0.0

    def __post_init__(self) -> None:
        if min(self.delay_ms, self.jitter_ms, self.rate_mbit) < 0 or not 0 <= self.loss <= 1:
            raise LabError(f"{self}: no value may be negative, and loss is a probability from 0 to 1")


@dataclasses.dataclass
class BoxSettings:
    """Settings of one box, kept in its directory.

    Attributes:
        disk_mib: size of its disk in MiB, used when the disk is made.
        tree: the root tree that its overlay lies on.
        layers: saved disks between the tree and the box's own disk, topmost first.
        link_cut: the cable stays unplugged over power cycles.
        shape: what the cable does to frames.
        cgroups: controller -> directory of the box's cgroup.
    """

    disk_mib: int = DEFAULT_DISK_MIB
    tree: str = ""
    layers: list[str] = dataclasses.field(default_factory=list)
    link_cut: bool = False
    shape: Shape | None = None
    cgroups: dict[str, str] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, file: Path) -> BoxSettings:
        """Settings in `file`; the defaults when there is none.

        Raises:
            LabError: the file is not what we write.
        """
        try:
            data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
            shape = data.pop("shape")
            return cls(**data, shape=Shape(**shape) if shape else None)
        except FileNotFoundError:
            return cls()
        except (ValueError, TypeError, KeyError) as error:
            raise LabError(
                f"{file} is damaged: {error}", hint=f"remove {file}, then run: python -m tests.lab down"
            ) from None

    def save(self, file: Path) -> None:
        """Write to `file`, whole or not at all."""
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(".new")
        aside.write_text(json.dumps(dataclasses.asdict(self), indent=1), encoding="utf-8")
        aside.replace(file)
