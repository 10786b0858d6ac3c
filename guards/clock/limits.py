"""Between which times the world must be."""

from __future__ import annotations

from dataclasses import dataclass

YEAR_SECONDS = 31_556_952.0  # mean Gregorian


@dataclass(frozen=True)
class TimeLimits:
    """A clock outside of them is insane; a server that says so is not believed.

    Attributes:
        floor_seconds: unix, when this release was built: a box without a battery boots in 1970, or at its image's date.
        years: after it.
    """

    floor_seconds: float
    years: float

    @property
    def ceiling_seconds(self) -> float:
        """Unix."""
        return self.floor_seconds + self.years * YEAR_SECONDS

    def sane(self, unix_seconds: float) -> bool:
        """Whether it can be that time now."""
        return self.floor_seconds <= unix_seconds <= self.ceiling_seconds
