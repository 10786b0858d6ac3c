"""Record the memory of a running stage for the leak estimator: one JSON object a line.

    python -m tests.guards.memory.record PID ADMIN_SOCKET OUTPUT [--period 10] [--seconds 3600]

Fields: `running_seconds` (monotonic, from 0), `retained_bytes` (RssAnon + VmSwap of the process), and what the stage's
health document declares: `kv_bytes`, `weight_bytes`, `open_sequences`, `rss_bytes`. A period in which either does not
answer leaves no line; the recording ends when the process is gone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from guards.memory.process import Gone, Unreadable, read_process
from guards.memory.windows import Sample
from guards.roots import Roots
from guards.stage_client import StageClient

DECLARED = ("kv_bytes", "weight_bytes", "open_sequences", "rss_bytes")


def read_trace(path: Path) -> list[Sample]:
    """A recorded trace.

    Raises:
        OSError, ValueError, KeyError: it can't be read, or is none.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError(f"{path}: no samples")
    names = ("retained_bytes", "kv_bytes", "weight_bytes", "open_sequences")
    return [Sample(float(line["running_seconds"]), *(int(line[name]) for name in names)) for line in lines]


def main(arguments: Sequence[str] | None = None) -> int:
    """Record until the time is over or the process is gone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pid", type=int)
    parser.add_argument("admin_socket", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--period", type=float, default=10.0, help="seconds from a sample to the next")
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long")
    options = parser.parse_args(arguments)
    client, began = StageClient(options.admin_socket), time.monotonic()
    with options.output.open("a", encoding="utf-8") as output:
        while (now := time.monotonic() - began) <= options.seconds:
            try:
                process = read_process(Roots(), options.pid)
            except Gone:
                print(f"process {options.pid} is gone", file=sys.stderr)
                return 0
            except Unreadable as error:
                print(error, file=sys.stderr)
                return 1
            health = client.health()
            if health is not None:
                declared = {name: health.get(name) for name in DECLARED}
                line = {"running_seconds": round(now, 3), "retained_bytes": process.retained_bytes, **declared}
                output.write(json.dumps(line) + "\n")
                output.flush()
            time.sleep(max(0.0, began + now + options.period - time.monotonic()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
