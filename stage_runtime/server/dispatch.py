"""Which epoch a link belongs to. A link may come before its PREPARE, or before its COMMIT, and then waits a little."""

from __future__ import annotations

import asyncio

from stage_runtime.link.connection import Link
from stage_runtime.link.messages import Hello
from stage_runtime.server.epoch import Epoch
from stage_runtime.server.epochs import Epochs

# Who waits for an epoch whose layers are being loaded looks so often whether its peer is still there.
LOOK_AGAIN_SECONDS = 1.0


class Dispatcher:
    """Hands links of the ring port to the epochs of this process.

    Args:
        epochs: see above.
        wait_seconds: how long a link waits for news of its epoch.
    """

    def __init__(self, epochs: Epochs, wait_seconds: float) -> None:
        self._epochs = epochs
        self._wait_seconds = wait_seconds

    def hello_problem(self, peer: Hello) -> str:
        """Why a link is refused; empty if it is welcome, or may become so."""
        if peer.role not in ("stage", "gateway"):
            return f"role {peer.role!r} is not served here"
        epoch = self._epochs.live.get(peer.epoch)
        return epoch.hello_problem(peer) if epoch is not None else self._over_problem(peer.epoch)

    async def serve(self, link: Link) -> None:
        """Serve a link until it ends."""
        epoch = await self._epoch_of(link)
        if epoch is None or (problem := epoch.hello_problem(link.peer)):
            link.close(problem if epoch is not None else f"epoch {link.peer.epoch} does not serve here")
            return
        await epoch.serve_link(link)

    async def _epoch_of(self, link: Link) -> Epoch | None:
        """The link's epoch, once it can serve it; None if it can't, or the link is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_seconds
        while not link.closed_reason and not self._over_problem(link.peer.epoch):
            epoch = self._epochs.live.get(link.peer.epoch)
            if epoch is not None and epoch.loaded and (epoch.view.committed or link.peer.role == "stage"):
                return epoch
            loading = epoch is not None and not epoch.loaded  # that may take its time
            left = deadline - loop.time()
            if left <= 0 and not loading:
                return None
            await self._epochs.changes.wait(LOOK_AGAIN_SECONDS if loading else left)
        return None

    def _over_problem(self, number: int) -> str:
        """Why an epoch that does not live here never will; empty if it lives, or may yet."""
        if number in self._epochs.live:
            return ""
        history = self._epochs.history
        if problem := history.over_problem(number):
            return problem
        known = max(history.newest_epoch, *self._epochs.live, 0)
        return f"epoch {number} is older than epoch {known}" if number < known else ""
