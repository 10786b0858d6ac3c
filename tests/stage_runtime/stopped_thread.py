"""A thread of another process that stops computing while the rest runs on, as after a read of a dying disk."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# linux/ptrace.h, sys/wait.h
PTRACE_SEIZE = 0x4206
PTRACE_INTERRUPT = 0x4207
PTRACE_DETACH = 17
WAIT_FOR_ANY_THREAD = 0x40000000
PATIENCE_SECONDS = 60.0


def thread_of(pid: int, name: str) -> int:
    """The id of a process' thread, by its name.

    Raises:
        LookupError: there is none, or more than one.
    """
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found = [int(task.name) for task in tasks if (task / "comm").read_text().strip() == name]
    if len(found) != 1:
        raise LookupError(f"process {pid} has {len(found)} threads named {name!r}")
    return found[0]


def _ptrace(request: int, thread: int) -> None:
    ptrace = ctypes.CDLL(None, use_errno=True).ptrace
    ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    if ptrace(request, thread, None, None) != 0:
        raise OSError(ctypes.get_errno(), f"ptrace {request:#x} of thread {thread}")


@contextmanager
def stopped_thread(pid: int, name: str) -> Iterator[None]:
    """Stop one thread while it waits for work; it goes on at the end, if its process still lives."""
    thread, stopped, leave = thread_of(pid, name), threading.Event(), threading.Event()

    def trace() -> None:  # all requests of a tracer come from one of its threads
        _ptrace(PTRACE_SEIZE, thread)
        _ptrace(PTRACE_INTERRUPT, thread)
        os.waitpid(thread, WAIT_FOR_ANY_THREAD)
        stopped.set()
        while not leave.wait(0.02):
            ended, status = os.waitpid(thread, WAIT_FOR_ANY_THREAD | os.WNOHANG)
            if ended and (os.WIFEXITED(status) or os.WIFSIGNALED(status)):
                return  # with its process, which its parent can wait for now
        _ptrace(PTRACE_DETACH, thread)

    tracer = threading.Thread(target=trace, name="tracer")
    tracer.start()
    try:
        assert stopped.wait(PATIENCE_SECONDS)
        yield
    finally:
        leave.set()
        tracer.join()
