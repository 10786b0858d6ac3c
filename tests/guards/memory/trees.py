"""Recorded boxes (`fixtures/`) laid out as files."""

from __future__ import annotations

from pathlib import Path

from guards.roots import Roots

FIXTURES = Path(__file__).parent / "fixtures"


def lay_out(device: str, directory: Path) -> Roots:
    """All files of a recorded box, below a directory."""
    for line in (FIXTURES / f"{device}.tree").read_text(encoding="utf-8").splitlines():
        name, _, content = line.partition(" = ")
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content.replace("\\n", "\n") + "\n", encoding="utf-8")
    return Roots(sys=directory / "sys", proc=directory / "proc")
