"""One answer while it is made: its entries in order of arrival, for one author and any number of readers."""

from __future__ import annotations

from fleet.gateway.entries import Entry
from fleet.gateway.news import News
from fleet.gateway.record import AdmissionRecord


class Answer:
    """Entries of an answer. Holds at most what max_tokens allows, so slow readers do not hold up the author.

    Args:
        record: what was admitted.
        entries: that exist already, after a restart.

    Attributes:
        published: number of entries that readers may see; the others are on their way into the journal.
        complete: the author adds no more; the last entry may still be missing, if the author was cancelled.
        news: tells readers of newly published entries and of the end.
    """

    def __init__(self, record: AdmissionRecord, entries: list[Entry] | None = None) -> None:
        self.record = record
        self.entries: list[Entry] = entries if entries is not None else []
        self.published = len(self.entries)
        self.complete = False
        self.news = News()

    def publish(self, count: int) -> None:
        """Let readers see the first `count` entries."""
        if count > self.published:
            self.published = count
            self.news.tell()

    def close(self) -> None:
        """The author has gone."""
        self.complete = True
        self.news.tell()
