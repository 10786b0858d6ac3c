"""Who may hold the name of a box: one live connection a box, and a clone is refused by name."""

from __future__ import annotations

import asyncio
import secrets

from fleet.coordinator.context import Context
from fleet.coordinator.peers import Peer
from fleet.coordinator.state import BoxState
from stage_runtime.link.frames import FrameType
from stage_runtime.link.membership import Challenge, ChallengeAnswer, Register

# A connection whose box is really there answers within a round trip; seconds are for a busy box.
CHALLENGE_SECONDS = 2.0


class Membership:
    """Connections of stages, by box."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._challenges: dict[str, tuple[str, asyncio.Event]] = {}  # box → nonce, answered

    async def admit(self, box: BoxState, peer: Peer, register: Register) -> str:
        """Give the name of a box to a new connection.

        The same process dials again, or the old connection does not answer any more: the old one is replaced.

        Returns:
            Why it is refused; empty if it is admitted.
        """
        old = box.peer
        if old is not None and register.process_id != box.record.process_id:
            if box.name in self._challenges:
                return f"{box.name} is registering from another connection just now"
            if await self._still_there(box.name, old):
                reason = f"{box.name} is held by two live processes: at {old.address} and at {peer.address}"
                self._context.event("box-clone-refused", reason, pipeline=box.pipeline, box=box.name)
                return reason
        if box.peer is not None:
            box.peer.link.close(f"{box.name} has a newer connection, from {peer.address}")
        box.peer = peer
        return ""

    def answered(self, peer: Peer, answer: ChallengeAnswer) -> None:
        """ANSWER came on a connection."""
        nonce, event = self._challenges.get(peer.box, ("", None))
        if event is not None and secrets.compare_digest(nonce.encode(), answer.nonce.encode()):
            event.set()

    async def _still_there(self, name: str, old: Peer) -> bool:
        nonce, answered = secrets.token_hex(16), asyncio.Event()
        self._challenges[name] = (nonce, answered)
        waiting = [asyncio.ensure_future(answered.wait()), asyncio.ensure_future(old.link.wait_closed())]
        try:
            old.post(FrameType.CHALLENGE, Challenge(nonce))
            await asyncio.wait(waiting, timeout=CHALLENGE_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            return answered.is_set()
        finally:
            del self._challenges[name]
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
