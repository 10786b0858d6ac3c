"""Trees of kernel files from compact text: `path = content`, `path -> target` for a link, `path/` for a directory."""

from __future__ import annotations

from pathlib import Path

from guards.roots import Roots

FIXTURES = Path(__file__).parent / "fixtures"


def plant(root: Path, text: str) -> None:
    """Write the files that the text names below a directory; `\\n` in a content is a line break."""
    for line in text.splitlines():
        if not line.strip() or line.startswith("#"):
            continue
        if " -> " in line:
            path, target = line.split(" -> ", 1)
            _made(root / path.strip()).symlink_to(target.strip())
        elif " = " in line:
            path, content = line.split(" = ", 1)
            _made(root / path.strip()).write_text(content.replace("\\n", "\n") + "\n", encoding="utf-8")
        else:
            (root / line.strip()).mkdir(parents=True, exist_ok=True)


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def fixture(name: str) -> str:
    """The text of a recorded file."""
    return (FIXTURES / name).read_text(encoding="utf-8")


def roots(base: Path, *, path: str = "") -> Roots:
    """Roots below a directory; no tool is found unless `path` names where."""
    return Roots(base / "sys", base / "proc", base / "dev", base / "etc", base / "run", path or str(base / "bin"))


def tool(base: Path, name: str, output: str, code: int = 0) -> None:
    """A recorded tool: it prints what the real one printed, and ends as that did."""
    directory = base / "bin"
    directory.mkdir(exist_ok=True)
    recorded = directory / f"{name}.recorded"
    recorded.write_text(output, encoding="utf-8")
    file = directory / name
    file.write_text(
        f'#!/bin/sh\nexec 3<"{recorded}"\nwhile IFS= read -r line <&3; do printf "%s\\n" "$line"; done\nexit {code}\n'
    )
    file.chmod(0o755)
