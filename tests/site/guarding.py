"""The lab's site with guards whose periods and dwell times are short, so that a test sees each of them act."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

LAB_TIME_SERVER = "10.77.0.14"
GUARDS: dict[str, Any] = {
    "thermal": {"period_seconds": 1, "down_dwell_seconds": 1, "up_dwell_seconds": 2},
    "memory": {
        "period_seconds": 1,
        "window_seconds": 5,
        "least_window_seconds": 60,
        "warm_up_seconds": 10,
        "plateau_seconds": 20,
        "settling_mb": 10,
        "ask_again_seconds": 10,
        "restart_apart_seconds": 5,
    },
    # a server that serves its own clock is all that this site has
    "clock": {"period_seconds": 2, "settle_seconds": 5, "local_stratum": 16, "silent_seconds": 20},
    "liveness": {"period_seconds": 1, "grace_seconds": 10, "restart_apart_seconds": 5},
    "surroundings": {"period_seconds": 2, "log_drop_apart_seconds": 2},
}
"""Memory: a leak must grow for a minute; see `guards/memory/leak.py` for why so short a stretch needs a fast leak."""


def guarded_inventory(lab_inventory: Path, directory: Path, *, time_servers: Sequence[str] = ()) -> Path:
    """The lab's inventory with short guards, in another directory; its paths made absolute.

    Args:
        time_servers: of the site; stages start anew for them, as it is they who judge the dates of certificates.
    """
    data: dict[str, Any] = yaml.safe_load(lab_inventory.read_text(encoding="utf-8"))
    for section, name in ((data, "state_dir"), (data, "bundle_dir"), (data["box_defaults"], "identity_file")):
        section[name] = str((lab_inventory.parent / section[name]).resolve())
    data["guards"] = GUARDS
    data["time_servers"] = list(time_servers)
    path = directory / "lab.yaml"
    path.write_text(yaml.safe_dump(data, sort_keys=False), encoding="utf-8")
    return path
