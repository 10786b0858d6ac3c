"""Runs inside a box: start a stage beside the serving one, wait until it is loaded, print what it read and holds.

Arguments: release's etc/stage.json, a directory for a changed copy of it, and `own` or `empty` (no layers at all).
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LOADED_DEADLINE_SECONDS = 120.0
POLL_SECONDS = 0.1
SPARE_PORT = 17401
NOBODY_LISTENS = {"host": "127.0.0.1", "port": 9}  # the copy must not take the serving ring's place


def changed_config(config: dict[str, Any], directory: Path, layers: str) -> Path:
    """A copy of stage.json with ports and socket of its own and neighbours that do not answer."""
    config = json.loads(json.dumps(config))
    config["ring"] = {"host": "127.0.0.1", "port": SPARE_PORT}
    config["metrics"] = {"host": "127.0.0.1", "port": SPARE_PORT + 1}
    config["admin_socket"] = str(directory / "stage.sock")
    config["peers"] = {box: NOBODY_LISTENS for box in config["peers"]}
    pipeline = config["plan"]["pipelines"][config["pipeline"]]
    if layers == "empty":  # the plan gives everything to another box: this one is a spare
        other = next(stage for stage in pipeline["stages"] if stage["box"] != config["box"])
        pipeline["stages"] = [{**other, "start": 0, "end": pipeline["layers"], "embedding": True, "head": True}]
    path = directory / "stage.json"
    path.write_text(json.dumps(config))
    return path


def health(path: str) -> dict[str, Any]:
    """The stage's answer on its admin socket."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        connection.sendall(b'{"op": "health"}\n')
        return dict(json.loads(connection.makefile().readline()))


def numbers(text: str, unit: int = 1) -> dict[str, int]:
    """`Name: 123 kB` lines of a /proc file as numbers."""
    pairs = (line.split(":") for line in text.splitlines() if ":" in line)
    return {
        name: int(value.split()[0]) * unit for name, value in pairs if value.split()[:1] and value.split()[0].isdigit()
    }


def main() -> None:
    """Print one JSON object."""
    etc, directory, layers = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    config = json.loads(etc.read_text())
    own = changed_config(config, directory, layers)
    release = etc.resolve().parents[1]
    python = sys.argv[4]
    with (directory / "stage.log").open("w") as log:
        stage = subprocess.Popen(
            [python, "-m", "stage_runtime", "--config", str(own)],
            env={
                **os.environ,
                "PYTHONPATH": str(release / "lib"),
                "OMP_NUM_THREADS": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
            },
            stderr=log,
            cwd="/",
        )
    try:
        deadline = time.monotonic() + LOADED_DEADLINE_SECONDS
        state: dict[str, Any] = {}
        while state.get("state") not in ("loaded", "ready"):
            if time.monotonic() > deadline or stage.poll() is not None:
                sys.exit(f"not loaded: {state}\n{(directory / 'stage.log').read_text()[-2000:]}")
            time.sleep(POLL_SECONDS)
            try:
                state = health(str(directory / "stage.sock"))
            except (FileNotFoundError, ConnectionRefusedError):
                continue
        process = Path(f"/proc/{stage.pid}")
        maps = (process / "maps").read_text().splitlines()
        result = {
            "read_bytes": numbers((process / "io").read_text())["read_bytes"],
            "pss_bytes": numbers((process / "smaps_rollup").read_text(), 1024)["Pss"],
            "peak_rss_bytes": numbers((process / "status").read_text(), 1024)["VmHWM"],
            "weight_bytes": state["weight_bytes"],
            "kernel": state["kernel"],
            "mapped_shards": sorted({Path(line.split()[-1]).name for line in maps if line.endswith(".safetensors")}),
        }
        print(json.dumps(result))
    finally:
        stage.terminate()
        stage.wait()


if __name__ == "__main__":
    main()
