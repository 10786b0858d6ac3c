"""Data on stdout, progress on stderr; rich is imported only when something is printed."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import Any

OUTPUT_SCHEMA = 1


def print_json(kind: str, data: Any) -> None:
    """Print `{"schema", "kind", "data"}` to stdout for scripts."""
    json.dump({"schema": OUTPUT_SCHEMA, "kind": kind, "data": data}, sys.stdout, indent=2)
    sys.stdout.write("\n")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table to stdout: boxed on a terminal, plain tab-separated lines elsewhere. Cells are data, not markup."""
    if not sys.stdout.isatty():
        for row in [list(columns), *rows]:
            sys.stdout.write("\t".join(str(cell) for cell in row) + "\n")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Console(no_color="NO_COLOR" in os.environ).print(table)


def progress(message: str) -> None:
    """One line on stderr that says what is being done."""
    sys.stderr.write(f"{message}\n")  # in one piece: boxes report from threads of their own
    sys.stderr.flush()
