"""Small C libraries that run inside boxes, compiled on the host when first needed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from tests.lab.paths import LabPaths
from tests.lab.processes import run

NVIDIA_SMI = Path(__file__).with_name("nvidia_smi.py")
GPU_VALUES = frozenset({
    "count", "temperature_celsius", "utilisation_percent", "used_mib", "total_mib", "power_milliwatts",
    "throttle_reasons", "init_error", "temperature_error",
})  # fmt: skip


def library(name: str) -> Path:
    """The shared library built from `<name>.c`, cached by the digest of its source.

    Raises:
        LabError: gcc is missing or refuses.
    """
    source = Path(__file__).with_name(f"{name}.c")
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    target = LabPaths().state / "native" / f"{name}-{digest}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_suffix(f".{os.getpid()}.new")
        run(["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", str(aside), str(source), "-ldl"])
        aside.rename(target)
    return target
