"""What a test wants to know about a box, looked at from outside so that looking changes nothing."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.lab import cgroups, network
from tests.lab.box import BoxBase
from tests.lab.capture import Capture
from tests.lab.faults import LAB_FILES
from tests.lab.tree import Entry, read_tree

JOURNAL_DEADLINE_SECONDS = 30.0
_ACCEPTED = re.compile(r"Accepted \S+ for (?P<user>\S+) from ")
_SESSION = re.compile(r"Starting session: (?P<what>.+?) for (?P<user>\S+) from ")
_CONNECTION = re.compile(r"Connection from ")


@dataclass(frozen=True)
class SshdCounts:
    """What sshd logged at `LogLevel VERBOSE`.

    Attributes:
        connections: TCP connections taken, logged in or not.
        accepted: users that logged in, one entry a login.
        sessions: sessions started, in order: `command`, `shell on pts/0`, `subsystem 'sftp'`, …
    """

    connections: int
    accepted: tuple[str, ...]
    sessions: tuple[str, ...]


def count_sshd(messages: Collection[str]) -> SshdCounts:
    """Count what sshd's log lines say."""
    accepted = tuple(match["user"] for message in messages if (match := _ACCEPTED.match(message)))
    sessions = tuple(match["what"] for message in messages if (match := _SESSION.match(message)))
    return SshdCounts(sum(1 for message in messages if _CONNECTION.match(message)), accepted, sessions)


class BoxViews(BoxBase):
    """Journal, file tree, SSH log, network traffic, one-line summary."""

    def journal(self, *arguments: str, since: str | None = None) -> list[dict[str, Any]]:
        """Journal entries as journalctl's JSON objects.

        Args:
            arguments: more words for journalctl, e.g. `"-u", "ssh"`.
            since: a cursor from `journal_cursor`; only later entries are given.
        """
        after = [f"--after-cursor={since}"] if since else []
        self.exec(["journalctl", "--sync"])
        argv = ["journalctl", "--no-pager", "--quiet", "--all", "--output=json", *after, *arguments]
        lines = self.exec(argv, deadline_seconds=JOURNAL_DEADLINE_SECONDS).stdout.splitlines()
        return [json.loads(line) for line in lines]

    def journal_cursor(self) -> str:
        """The journal's present end, for `journal(since=…)` and `sshd_counts`. Holds when the clock is shifted."""
        return str(self.journal("--lines=1")[-1]["__CURSOR"])

    def sshd_counts(self, since: str | None = None) -> SshdCounts:
        """Connections, logins and sessions that sshd logged after the cursor `since` (from the start when None)."""
        return count_sshd([str(entry.get("MESSAGE", "")) for entry in self.journal("-t", "sshd", since=since)])

    def tree_digest(self, *, leave_out: Collection[str] = ()) -> dict[str, Entry]:
        """Every path of the box with mode, owner, size and digest of its content, and inode and change time apart.

        Left out are `/proc /sys /dev /run /tmp /var/log`, login records, and what the lab puts into boxes itself
        (`faults.LAB_FILES`). The files are read from the host: no process runs in the box, and no login happens.

        Args:
            leave_out: more absolute paths, each with all that is below it.
        """
        return read_tree(Path(f"/proc/{self.need_init()}/root"), leave_out={*LAB_FILES, *leave_out})

    def capture(self, file: Path | None = None) -> Capture:
        """Capture what passes the box's switch port: `with box.capture() as seen: …; seen.tcp()`."""
        self.need_init()
        return Capture(self.paths.port, file or self.paths.directory / f"capture-{time.time_ns()}.pcap")

    def drop_page_cache(self) -> None:
        """Write dirty pages out and drop the page cache (of the whole machine: boxes share the kernel)."""
        self.exec(["sync"])
        Path("/proc/sys/vm/drop_caches").write_text("3", encoding="ascii")

    def summary(self) -> str:
        """One line: name, address, state, memory, cable."""
        if not self.is_on:
            return f"{self.name:8} {self.address:12} off"
        frozen = Path(self.settings.cgroups["freezer"], "freezer.state").read_text(encoding="ascii").strip()
        if frozen == "THAWED":
            state = self.exec(["systemctl", "is-system-running"], check=False).stdout.strip()
        else:
            state = "frozen"
        used_mib = cgroups.memory_used(self.settings.cgroups) >> 20
        link = network.link_state(self.paths)
        shape = self.settings.shape
        return f"{self.name:8} {self.address:12} {state}, {used_mib} MiB, link {link}" + (f", {shape}" if shape else "")
