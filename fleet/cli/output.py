"""Data on stdout, progress on stderr; rich is imported only when something is printed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

OUTPUT_SCHEMA = 1
PLAIN_CELL_CHARACTERS = 12  # a shorter cell is never broken over two lines


def print_json(kind: str, data: Any) -> None:
    """Print `{"schema", "kind", "data"}` to stdout for scripts."""
    json.dump({"schema": OUTPUT_SCHEMA, "kind": kind, "data": data}, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table to stdout: aligned on a terminal, tab-separated lines with every column elsewhere.

    On a terminal, columns that are empty in every row are left out, headings break between words, and only long cells
    wrap, so that a usual table fits 80 columns. Cells are data, not markup.
    """
    rows = [[str(cell) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for row in [list(columns), *rows]:
            sys.stdout.write("\t".join(row) + "\n")
        return
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    shown = [index for index in range(len(columns)) if not rows or any(row[index] for row in rows)]
    table = Table(title=title or None, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for index in shown:
        longest = max((len(row[index]) for row in rows), default=0)
        heading = columns[index].replace(" ", "\n") if longest <= PLAIN_CELL_CHARACTERS else columns[index]
        table.add_column(heading, overflow="fold", no_wrap=longest <= PLAIN_CELL_CHARACTERS, vertical="top")
    for row in rows:
        table.add_row(*(Text(row[index]) for index in shown))
    console = Console(no_color="NO_COLOR" in os.environ)
    unbounded = console.options.update(max_width=sys.maxsize)
    if Measurement.get(console, unbounded, table).minimum > console.width:
        table.padding = 0  # one space between columns instead of two
    console.print(table)


def short_path(path: Path) -> str:
    """A path for people: below the present directory it is relative to it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def progress(message: str) -> None:
    """One line on stderr that says what is being done. A run goes on when nobody reads it any more."""
    with contextlib.suppress(BrokenPipeError):
        sys.stderr.write(f"{message}\n")  # in one piece: boxes report from threads of their own
        sys.stderr.flush()
