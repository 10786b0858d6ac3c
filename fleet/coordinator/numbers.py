"""Epoch numbers of one pipeline: counted up, never given out twice, reserved on disk before they are."""

from __future__ import annotations

from fleet.coordinator.store import EPOCHS_RESERVED, Store


class EpochNumbers:
    """Gives out numbers; a number is given out only once the store has it reserved, which nobody has to wait for."""

    def __init__(self, pipeline: str, store: Store) -> None:
        self._pipeline = pipeline
        self._store = store
        self._next = 1
        self._reserved = 0

    def restore(self, highest: int) -> None:
        """Go on above the highest number that may have been given out."""
        self._next = highest + 1
        self.reserve()

    def seen(self, epoch: int) -> None:
        """Somebody knows this number: it is never given out again."""
        if epoch >= self._next:
            self._next = epoch + 1
            self.reserve()

    def take(self) -> int:
        """The next number."""
        epoch, self._next = self._next, self._next + 1
        if epoch >= self._reserved - EPOCHS_RESERVED // 2:
            self.reserve()
        return epoch

    def reserve(self) -> None:
        """Have the store keep that the next numbers may be in use."""
        self._reserved = self._next + EPOCHS_RESERVED
        self._store.reserve(self._pipeline, self._next)
