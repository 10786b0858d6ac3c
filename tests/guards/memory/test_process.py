from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from guards.memory.process import Gone, ProcessMemory, Unreadable, read_process
from guards.roots import Roots

STAT = (
    "4242 (python3 (a b)) S 1 4242 4242 0 -1 4194304 9 0 0 0 1 2 0 0 20 0 7 0 812345 3000000 900 18446744073709551615"
)
STATUS = """Name:\tpython3
State:\tS (sleeping)
Pid:\t4242
VmPeak:\t 3145728 kB
VmRSS:\t  901120 kB
RssAnon:\t  700000 kB
RssFile:\t  201120 kB
RssShmem:\t       0 kB
VmSwap:\t     512 kB
Threads:\t7
"""


@pytest.fixture
def roots(tmp_path: Path) -> Roots:
    """A box with one process."""
    for name, content in (("4242/stat", STAT), ("4242/status", STATUS), ("sys/kernel/random/boot_id", "b00t")):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content + "\n", encoding="utf-8")
    return Roots(proc=tmp_path)


def test_anonymous_memory_counts_wherever_it_is(roots: Roots) -> None:
    assert read_process(roots, 4242) == ProcessMemory("b00t/4242/812345", (700000 + 512) * 1024)


def test_a_kernel_without_swap_or_boot_id(roots: Roots) -> None:
    (roots.proc / "4242/status").write_text("RssAnon:\t8 kB\n", encoding="utf-8")
    (roots.proc / "sys/kernel/random/boot_id").unlink()
    assert read_process(roots, 4242) == ProcessMemory("/4242/812345", 8192)


def test_no_process(roots: Roots) -> None:
    with pytest.raises(Gone):
        read_process(roots, 4243)


@pytest.mark.parametrize("stat", [STAT.replace(") S ", ") Z "), "4242 (x) S 1", ""])
def test_an_ended_or_half_read_process_is_gone(stat: str, roots: Roots) -> None:
    (roots.proc / "4242/stat").write_text(stat, encoding="utf-8")
    with pytest.raises(Gone):
        read_process(roots, 4242)


@pytest.mark.parametrize("line", ["", "RssAnon:\t kB", "RssAnon:\tlots kB"])
def test_a_kernel_that_does_not_tell(line: str, roots: Roots) -> None:
    (roots.proc / "4242/status").write_text(f"Name:\tx\n{line}\n", encoding="utf-8")
    with pytest.raises(Unreadable, match="RssAnon"):
        read_process(roots, 4242)


def test_a_file_that_can_not_be_read(roots: Roots) -> None:
    (roots.proc / "4242/status").unlink()
    (roots.proc / "4242/status").mkdir()
    with pytest.raises(Unreadable, match="directory"):
        read_process(roots, 4242)


def test_memory_that_a_real_process_takes() -> None:
    program = (
        "import sys; sys.stdin.readline(); held = bytearray(b'x') * (32 << 20); print(flush=True); sys.stdin.readline()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        before = read_process(Roots(), process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        after = read_process(Roots(), process.pid)
        process.stdin.close()
    assert after.identity == before.identity
    assert after.retained_bytes - before.retained_bytes >= 32 << 20
    with pytest.raises(Gone):
        read_process(Roots(), process.pid)
