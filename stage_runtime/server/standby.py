"""Layers that wait beside those that serve, so that a takeover is quick; loaded in the background, as memory allows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable

from fleet.errors import FleetError
from stage_runtime.link.membership import Standby
from stage_runtime.model.store import Piece
from stage_runtime.server.loader import Loader, NoMemory

log = logging.getLogger(__name__)

# After a switch the answers that wait for it have the machine to themselves for so long.
CALM_SECONDS = 2.0


def standby_pieces(standby: Standby, layers: int) -> tuple[Piece, ...]:
    """What an order names.

    Raises:
        ValueError: the model has no such layer, or it is named twice.
    """
    if any(layer >= layers for layer in standby.layers) or len(set(standby.layers)) != len(standby.layers):
        raise ValueError(f"STANDBY of layers that the model of {layers} does not have")
    return (
        *(Piece("layer", layer) for layer in standby.layers),
        *([Piece("head")] if standby.head else []),
        *([Piece("embedding")] if standby.embedding else []),
    )


class StandbyKeeper:
    """Keeps in memory what is needed and what is wanted beside it, and nothing else.

    Args:
        loader: gets weights.
        needed: pieces of the plans that are in force or prepared.
        on_bug: told of an error that nothing handles.
    """

    def __init__(
        self,
        loader: Loader,
        needed: Callable[[], frozenset[Piece]],
        on_bug: Callable[[BaseException], None],
    ) -> None:
        self._loader = loader
        self._needed = needed
        self._on_bug = on_bug
        self._wanted: tuple[Piece, ...] = ()
        self._tasks: set[asyncio.Task[None]] = set()

    def want(self, pieces: Iterable[Piece]) -> None:
        """From now on these are wanted beside what is needed, in this order."""
        self._wanted = tuple(pieces)
        self.restart()

    def restart(self) -> None:
        """What is needed has changed: free the rest, then go on loading."""
        self._cancel()
        task = asyncio.ensure_future(self._work())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def pause(self) -> None:
        """Stop loading; something more urgent needs the disk. What is being loaded is loaded to its end."""
        self._cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _work(self) -> None:
        await asyncio.sleep(CALM_SECONDS)
        await self._loader.keep(self._needed() | frozenset(self._wanted))
        try:
            await self._loader.repack()
            await self._loader.load((*sorted(self._needed(), key=_order), *self._wanted), background=True)
        except NoMemory as error:
            log.info("standby: no memory for more (%s)", error)
        except FleetError as error:
            log.warning("standby: %s", error.message, extra={"hint": error.hint})

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_bug(error)


def _order(piece: Piece) -> tuple[bool, bool, int]:
    """Layers, then the head, then the embedding, which a tied head has verified by then."""
    return piece.kind != "layer", piece.kind == "embedding", piece.index
