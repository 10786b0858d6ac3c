"""The reference page of the inventory format, generated from the model."""

from __future__ import annotations

from itertools import groupby

from fleet.inventory.schema import Key, keys, sections

INTRODUCTION = """\
# Inventory reference

Every key of an inventory file. `NAME` stands for a name of your choice: small letters, digits and hyphens.
Keys without a default must be there. Relative paths start from the inventory file's directory.

- Text that looks like a number is quoted: `python: "3.10"`. Only `true` and `false` are truth values.
- Secrets are references: `!env VARIABLE`, or `!file PATH` of a file with mode 0600.
- Anchors and merge keys (`<<`) work; top-level keys that start with `x-` may hold them.
- One file is one site, in UTF-8.
"""


def reference_page() -> str:
    """Markdown: one table a section, in the order of the model."""
    summaries = dict(sections())
    parts = [INTRODUCTION]
    for section, group in groupby(keys(), key=lambda key: key.section):
        heading = f"`{section}`" if section else "Top level"
        summary = (summaries[section].__doc__ or "").strip().splitlines()[0]
        parts.append(f"\n## {heading}\n\n{summary}\n\n| key | type | default | meaning |\n|---|---|---|---|\n")
        parts += [_row(key) for key in group]
    return "".join(parts)


def _row(key: Key) -> str:
    default = "must be there" if key.required else f"`{key.default}`" if key.default else "–"
    cells = (f"`{key.name}`", key.type, default, key.description)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
