"""supervisord.conf as text from data, safe for supervisor's parser: `%` expansions, inline comments, quoting."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

MEBIBYTE = 1 << 20
PROGRAM_LOG_BYTES = 2 * MEBIBYTE
PROGRAM_LOG_BACKUPS = 3
SUPERVISOR_LOG_BYTES = MEBIBYTE
SUPERVISOR_LOG_BACKUPS = 1
# The sum of the largest log sizes must stay below this share of the free disk (docker-like defaults fill an SD card).
LOG_SHARE_OF_FREE_DISK = 0.05
# supervisord waits one second longer after each failed start: 1000 of them are 5.8 days, the last 17 minutes apart.
# So a program whose cause of failure is gone comes back by itself, and never spins.
START_RETRIES = 1000
SOCKET_MODE = "0700"
# Expands to nothing; between white space and `;` or `#` it keeps supervisor from reading an inline comment.
NOTHING = "%(here).0s"


@dataclass(frozen=True)
class Program:
    """A program that supervisord runs.

    Attributes:
        name: supervisord's program name.
        argv: the command; quoted here.
        environment: variables set on top of supervisord's own.
        log_file: stdout and stderr together.
        user: who it runs as; None: who supervisord runs as.
        start_seconds: it counts as started when it has run that long; at least 1.
        stop_seconds: from SIGTERM to SIGKILL, whole process group.
    """

    name: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    log_file: str
    user: str | None
    start_seconds: int
    stop_seconds: int


def log_bytes(programs: int) -> int:
    """Most bytes that the logs of a supervisord with so many programs can take on disk."""
    own = SUPERVISOR_LOG_BYTES * (SUPERVISOR_LOG_BACKUPS + 1)
    return own + programs * PROGRAM_LOG_BYTES * (PROGRAM_LOG_BACKUPS + 1)


def escape(value: str) -> str:
    """A value that supervisor's parser reads back as it is, whatever `%`, `;` or `#` stand in it.

    Raises:
        ValueError: a line break or another control character.
    """
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise ValueError(f"control character in {value!r}")
    escaped: list[str] = []
    before = ""
    for character in value:
        if character in ";#" and before.isspace():
            escaped.append(NOTHING)
        escaped.append("%%" if character == "%" else character)
        before = character
    return "".join(escaped)


def quote_environment(variables: Mapping[str, str]) -> str:
    """`KEY="value",…` as supervisor reads it.

    Raises:
        ValueError: supervisor's format cannot express it: a value with both kinds of quotes or a quote at either
            end (supervisor strips them), a control character, or a name that is no identifier.
    """
    parts = []
    for name, value in sorted(variables.items()):
        if not (name.isascii() and name.isidentifier()):
            raise ValueError(f"environment variable {name!r}: not a name")
        if value.strip("'\"") != value or ("'" in value and '"' in value):
            raise ValueError(f"environment variable {name}: supervisor cannot express the quotes of its value")
        quote = "'" if '"' in value else '"'
        parts.append(f"{name}={quote}{escape(value)}{quote}")
    return ",".join(parts)


def render_supervisor_config(*, socket: str, pid_file: str, log_file: str, programs: Sequence[Program]) -> str:
    """The whole supervisord.conf.

    Args:
        socket: XML-RPC unix socket; a new supervisord checks a stale one before it unlinks it.
        pid_file: beside the socket, where a reboot clears it.
        log_file: supervisord's own log.
        programs: in the order in which they start.

    Raises:
        ValueError: a program with start_seconds < 1 (it would restart for ever without back-off), twice the same
            name, or a value that the format cannot express.
    """
    names = [program.name for program in programs]
    if len(set(names)) != len(names):
        raise ValueError(f"twice the same program: {names}")
    sections = [
        ("unix_http_server", {"file": escape(socket), "chmod": SOCKET_MODE}),
        (
            "supervisord",
            {
                "logfile": escape(log_file),
                "logfile_maxbytes": str(SUPERVISOR_LOG_BYTES),
                "logfile_backups": str(SUPERVISOR_LOG_BACKUPS),
                "pidfile": escape(pid_file),
                "strip_ansi": "true",
                "umask": "027",
            },
        ),
        (
            "rpcinterface:supervisor",
            {"supervisor.rpcinterface_factory": "supervisor.rpcinterface:make_main_rpcinterface"},
        ),
        ("supervisorctl", {"serverurl": f"unix://{escape(socket)}"}),
        *((f"program:{program.name}", _program_options(program)) for program in programs),
    ]
    lines: list[str] = []
    for name, options in sections:
        # No space after `=`: a value that begins with `;` would be read as a comment.
        lines += [f"[{name}]", *(f"{key}={value}" for key, value in options.items()), ""]
    return "\n".join(lines)


def _program_options(program: Program) -> dict[str, str]:
    if program.start_seconds < 1:
        raise ValueError(f"program {program.name}: startsecs={program.start_seconds}, expected at least 1")
    options = {
        "command": escape(shlex.join(program.argv)),
        "directory": "/",
        "environment": quote_environment(program.environment),
        "autostart": "true",
        "autorestart": "true",
        "startsecs": str(program.start_seconds),
        "startretries": str(START_RETRIES),
        "stopsignal": "TERM",
        "stopwaitsecs": str(program.stop_seconds),
        "stopasgroup": "true",
        "killasgroup": "true",
        "redirect_stderr": "true",
        "stdout_logfile": escape(escape(program.log_file)),  # supervisor expands this one twice
        "stdout_logfile_maxbytes": str(PROGRAM_LOG_BYTES),
        "stdout_logfile_backups": str(PROGRAM_LOG_BACKUPS),
    }
    if program.user is not None:
        options["user"] = program.user
    return options
