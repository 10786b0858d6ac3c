"""What a stage sees of its ring neighbours, told to the coordinator at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from stage_runtime.link.connection import Link, LinkError
from stage_runtime.link.endpoints import BoxAddress, LinkSettings, dial
from stage_runtime.link.membership import LinkReport
from stage_runtime.link.messages import Hello

# A report carries a reason, not all that a peer made of it.
TEXT_CHARACTERS = 500
RING_KEY = "ring"  # key of Hello.extra: which forming of the ring a link belongs to


def ring_hello(own: Hello, ring: str) -> Hello:
    """The Hello of a link that belongs to one forming of the ring."""
    return replace(own, extra={RING_KEY: ring})


class LinkWatch:
    """Makes LINK_REPORTs of one epoch's ring. A link that this side closed itself is nobody's fault and no news.

    Args:
        epoch: of the ring.
        tell: takes the report.
    """

    def __init__(self, epoch: int, tell: Callable[[LinkReport], None]) -> None:
        self._epoch = epoch
        self._tell = tell

    async def dial(self, settings: LinkSettings, box: BoxAddress, ring: str) -> Link:
        """Connect to the successor for one forming of the ring, and report how that went.

        Raises:
            LinkError: it could not be reached, or refused.
        """
        try:
            link = await dial(settings, box, ring_hello(settings.own, ring))
        except LinkError as error:
            self._report(box.box, "unreachable", str(error))
            raise
        self.connected(link)
        return link

    def connected(self, link: Link) -> None:
        """A neighbour's link is there."""
        self._report(link.peer.box, "connected", "")

    def ended(self, link: Link) -> None:
        """A neighbour's link is over, whoever ended it."""
        error = link.ended_by_peer
        if error is not None:
            kind: Literal["silent", "closed"] = "silent" if error.kind == "silent" else "closed"
            self._report(link.peer.box, kind, str(error), error.silent_seconds)

    def _report(
        self,
        box: str,
        kind: Literal["connected", "closed", "silent", "unreachable"],
        text: str,
        silent_seconds: float = 0.0,
    ) -> None:
        self._tell(LinkReport(box, self._epoch, kind, text[:TEXT_CHARACTERS], silent_seconds))
