"""The agent's loop: one request after the other from stdin, answers on stdout, until the operator is gone."""

from __future__ import annotations

import errno
import os
import shlex
import sys
import traceback
from typing import Any, BinaryIO

from fleet.provision.agent import inspect, lock, supervise
from fleet.provision.agent.apply import Application
from fleet.provision.agent.errors import AgentError
from fleet.provision.agent.peer import Peer
from fleet.provision.agent.wire import Message, Reader, Writer

# a disk that is full, read-only or broken, or something else in a path's place: the box's trouble, not a bug of ours
MACHINE_ERRORS = {
    errno.EACCES,
    errno.EPERM,
    errno.EROFS,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.EMFILE,
}


class Agent:
    """Keeps the desired state (without contents) and the run lock between requests."""

    def __init__(self, peer: Peer) -> None:
        self._peer = peer
        self._spec: dict[str, Any] = {}
        self._lock: int | None = None

    def answer(self, request: Message) -> Message:
        """One request: "facts" comes first and brings the desired state."""
        operation = request["op"]
        if operation == "facts":
            self._spec = request["spec"]
            self._check_root()
            if request["lock"]:
                self._take_lock(request["holder"])
            self._peer.step("facts")
            self._peer.waits_for("the digests of everything managed")
            return {"op": "facts", "facts": inspect.collect(self._spec, request["texts"])}
        if operation == "apply":
            return {"op": "applied", "started": Application(self._spec, request["changes"], self._peer).run()}
        if operation == "stop":
            self._spec = request["spec"]
            self._check_root()
            self._take_lock(request["holder"])
            self._peer.step("stop")
            return {"op": "stopped", "programs": supervise.shut_down(self._spec["supervisor"], self._peer)}
        raise ValueError(f"unknown request {operation}")

    def _check_root(self) -> None:
        if self._spec["privileged"] and os.geteuid() != 0:
            raise AgentError(
                "start", f"runs as user {os.geteuid()}, expected root", hint="user: root, or passwordless sudo"
            )

    def _take_lock(self, holder: str) -> None:
        if self._lock is None:
            path = lock.lock_path(self._spec["privileged"], self._spec["supervisor"]["socket"])
            self._lock = lock.take(path, holder)


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answer requests until the end of input, or until one fails: the failure is the last answer, because content may
    still be on its way and must not be read as requests. A bug of ours travels with its traceback."""
    read1: Any = requests  # a BufferedReader: BinaryIO knows no read1
    peer = Peer(Reader(read1.read1), Writer(_whole(answers)))
    agent = Agent(peer)
    try:
        while True:
            peer.send(agent.answer(peer.next_request()))
    except EOFError:
        pass  # the operator is done, or gone
    except AgentError as error:
        peer.send(_error(error.kind, error.step, error.message, error.hint, error.detail))
    except Exception as error:
        if isinstance(error, OSError) and error.errno in MACHINE_ERRORS:
            place = f"{error.filename}: " if error.filename else ""
            hint = f"on the box: df -h; dmesg | tail; ls -ld {shlex.quote(str(error.filename or '/'))}"
            peer.send(_error("failed", peer.present_step, f"{place}{error.strerror}", hint, ""))
        else:  # a bug of ours: the operator's side writes it to a file
            message = f"{type(error).__name__}: {error}"
            peer.send(_error("bug", peer.present_step, message, "", traceback.format_exc()))
    finally:
        peer.close()


def _error(kind: str, step: str, message: str, hint: str, detail: str) -> Message:
    return {"op": "error", "kind": kind, "step": step, "message": message, "hint": hint, "detail": detail}


def _whole(stream: BinaryIO) -> Any:
    def write(data: bytes) -> None:
        stream.write(data)
        stream.flush()

    return write


def main() -> None:
    """Speak over stdin and stdout; whatever else prints goes to stderr and can't disturb the conversation."""
    os.umask(0o022)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)
    sys.stderr.flush()
    os._exit(0)  # a pipe that the operator closed must not make Python complain while it ends
