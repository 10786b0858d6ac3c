"""supervisord's XML-RPC over its unix socket, with the standard library."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import struct
import xmlrpc.client
from typing import Any

from fleet.provision.agent.errors import AgentError

RPC_SECONDS = 10.0
HEALTH_SECONDS = 5.0
MAX_HEALTH_BYTES = 1024 * 1024
PEER_CREDENTIALS = struct.Struct("iII")  # struct ucred of unix(7): process, user, group


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=RPC_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(RPC_SECONDS)
        self.sock.connect(self._path)


class _Transport(xmlrpc.client.Transport):
    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def make_connection(self, host: Any) -> http.client.HTTPConnection:
        del host  # a unix socket has none
        return _UnixConnection(self._path)


class SupervisorRpc:
    """The calls we use. All raise AgentError when supervisord does not answer or refuses."""

    def __init__(self, path: str) -> None:
        self.path = path

    def _call(self, method: str, *arguments: Any) -> Any:
        proxy = xmlrpc.client.ServerProxy("http://localhost/RPC2", transport=_Transport(self.path))
        try:
            return getattr(proxy.supervisor, method)(*arguments)
        except (OSError, http.client.HTTPException, xmlrpc.client.ProtocolError) as error:
            message = f"supervisord at {self.path} did not answer {method}: {error}"
            raise AgentError("supervisor", message) from error
        except xmlrpc.client.Fault as fault:
            detail = ", ".join(str(argument) for argument in arguments)
            message = f"supervisord refuses {method}({detail}): {fault.faultString}"
            raise AgentError("supervisor", message) from fault

    def answers(self) -> bool:
        """A supervisord that runs answers here; a socket left behind by a power cut does not."""
        try:
            return bool(self._call("getState")["statename"] == "RUNNING")
        except AgentError:
            return False

    def process_id(self) -> int:
        """Of supervisord itself."""
        return int(self._call("getPID"))

    def programs(self) -> dict[str, dict[str, Any]]:
        """Program name → supervisord's ProcessInfo (group:name where the two differ)."""
        found = {}
        for info in self._call("getAllProcessInfo"):
            same = info["group"] == info["name"]
            found[info["name"] if same else f"{info['group']}:{info['name']}"] = info
        return found

    def reload(self) -> tuple[list[str], list[str], list[str]]:
        """Read the configuration again: (added, changed, removed) groups; nothing is started or stopped yet."""
        added, changed, removed = self._call("reloadConfig")[0]
        return added, changed, removed

    def stop_group(self, group: str) -> None:
        """Ask a group to stop (its stopasgroup reaches grandchildren); does not wait."""
        self._call("stopProcessGroup", group, False)

    def start_group(self, group: str) -> None:
        """Ask a group to start; does not wait. Members that start by themselves already are no error."""
        self._call("startProcessGroup", group, False)

    def remove_group(self, group: str) -> None:
        """Forget a stopped group."""
        self._call("removeProcessGroup", group)

    def add_group(self, group: str) -> None:
        """Take a group from the configuration; its autostart programs start."""
        self._call("addProcessGroup", group)

    def shutdown(self) -> None:
        """Stop all programs, then supervisord."""
        self._call("shutdown")


def ask_health(path: str, pid: int) -> dict[str, Any]:
    """One `{"op":"health"}` over a program's admin socket.

    Args:
        pid: of the program that supervisord started. Another process that answers, such as one that was left behind,
            says nothing about it.

    Returns:
        Its answer, or {"error": why} when there is none.
    """
    data = b""
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
            connection.settimeout(HEALTH_SECONDS)
            connection.connect(path)
            answering = PEER_CREDENTIALS.unpack(
                connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
            )[0]
            if answering != pid:
                return {"error": f"{os.path.basename(path)}: process {answering} answers instead of {pid}"}
            connection.sendall(b'{"op":"health"}\n')
            while not data.endswith(b"\n") and len(data) < MAX_HEALTH_BYTES:
                part = connection.recv(65536)
                if not part:
                    break
                data += part
        answer = json.loads(data)
    except OSError as error:
        return {"error": f"{os.path.basename(path)}: {error.strerror or error}"}
    except ValueError as error:
        return {"error": f"{os.path.basename(path)}: {error}"}
    return answer if isinstance(answer, dict) else {"error": "the answer is no JSON object"}
