"""The section `guards` of an inventory, made from the guards' own settings: keys, defaults and descriptions stand there
alone."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model

from fleet.inventory.section import Section
from guards.settings import GuardSettings

MOST = 1e9  # no period, threshold or count is larger
Setting = Annotated[float, Field(ge=0, le=MOST)]


def _section_of(kind: type[Any]) -> type[Section]:
    """The section of one guard."""
    fields: dict[str, Any] = {
        field.name: (Setting, Field(default=field.default, description=field.metadata["description"]))
        for field in dataclasses.fields(kind)
    }
    return create_model(kind.__name__, __base__=Section, __doc__=kind.__doc__, **fields)


def _guards() -> type[Section]:
    parts: dict[str, Any] = {}
    for field in dataclasses.fields(GuardSettings):
        kind = type(getattr(GuardSettings(), field.name))
        section, summary = _section_of(kind), (kind.__doc__ or "").strip().splitlines()[0]
        parts[field.name] = (section, Field(default=section(), description=summary))
    observe = Field(default=False, description="guards only say what they would do, and do nothing")
    return create_model(
        "Guards",
        __base__=Section,
        __doc__="What the guards of every box watch, and from where on they act.",
        observe=(bool, observe),
        **parts,
    )


if TYPE_CHECKING:
    Guards = Section  # made while the program runs, so a type checker knows no more of it
else:
    Guards = _guards()
