"""Recorded boxes (`fixtures/`) laid out as files."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from guards import deadline
from guards.roots import Roots

FIXTURES = Path(__file__).parent / "fixtures"


class Tree:
    """A box's `/sys` below a directory.

    Attributes:
        roots: to give to sources; its directory of tools is empty at first.
    """

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._faults: dict[Path, int] = {}
        self._tools = directory / "tools"
        self._tools.mkdir()
        self.roots = Roots(sys=directory / "sys", path=str(self._tools))
        real = deadline.read_file

        def read(path: Path) -> str:
            # errors that no file of a test directory can answer with
            if path in self._faults:
                raise OSError(self._faults[path], os.strerror(self._faults[path]))
            return real(path)

        monkeypatch.setattr(deadline, "read_file", read)

    def lay_out(self, device: str) -> Tree:
        """All of a fixture."""
        for line in (FIXTURES / f"{device}.tree").read_text(encoding="utf-8").splitlines():
            if " ! " in line:
                self.fault(*line.split(" ! "))
            else:
                self.write(*line.split(" = ", 1))
        return self

    def write(self, name: str, content: str) -> None:
        """A file's content; it mends a fault."""
        path = self._path(name)
        path.write_text(f"{content}\n", encoding="utf-8")

    def heat(self, celsius: float, zone: int = 0) -> None:
        """Of a thermal zone, by number."""
        self.write(f"class/thermal/thermal_zone{zone}/temp", str(round(celsius * 1000)))

    def fault(self, name: str, fault: str) -> Path:
        """A file that can't be read; its path."""
        path = self._path(name)
        if fault == "hangs":
            os.mkfifo(path)  # opening it waits for a writer for ever
        elif fault == "vanishes":
            path.symlink_to("gone")
        else:
            path.touch()
            self._faults[path] = getattr(errno, fault)
        return path

    def tool(self, name: str, script: str) -> None:
        """A program on the box."""
        path = self._tools / name
        path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        path.chmod(0o755)

    def _path(self, name: str) -> Path:
        path = self.roots.sys / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._faults.pop(path, None)
        path.unlink(missing_ok=True)
        return path
