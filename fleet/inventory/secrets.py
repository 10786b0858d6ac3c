"""Secrets of an inventory: the file names an environment variable or a file, and never the value."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import stat
from pathlib import Path
from typing import Literal

from pydantic import SecretStr

from fleet.errors import ExitCode, FleetError

MAX_SECRET_BYTES = 64 * 1024
MAX_TARGET_CHARACTERS = 4096
OPEN_TO_OTHERS = stat.S_IRWXG | stat.S_IRWXO
VARIABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SecretReference(SecretStr):
    """A secret that shows where it comes from (`!env NAME` or `!file PATH`) and never what it is."""

    def __init__(self, kind: Literal["env", "file"], target: str) -> None:
        super().__init__("")
        self.kind = kind
        self.target = target
        self._value: str | None = None

    @property
    def reference(self) -> str:
        """The reference as the inventory writes it."""
        return f"!{self.kind} {self.target}"

    def get_secret_value(self) -> str:
        """The value.

        Raises:
            FleetError: the inventory was loaded with `resolve_secrets=False`.
        """
        if self._value is None:
            raise FleetError(
                f"the secret {self.reference} was not read: this command works without secrets",
                exit_code=ExitCode.INVALID_INVENTORY,
            )
        return self._value

    def resolve(self, base_directory: Path) -> str | None:
        """Read the value.

        Args:
            base_directory: directory that a relative `!file` path starts from.

        Returns:
            None, or what is wrong and what to do about it.
        """
        try:
            value = self._from_environment() if self.kind == "env" else self._from_file(base_directory)
        except _Unusable as error:
            return str(error)
        self._value = value
        return None

    def _from_environment(self) -> str:
        value = os.environ.get(self.target)
        if value is None:
            raise _Unusable(f"environment variable {self.target} is not set; run: export {self.target}=…")
        if not value:
            raise _Unusable(f"environment variable {self.target} is empty; run: export {self.target}=…")
        return value

    def _from_file(self, base_directory: Path) -> str:
        path = base_directory / Path(self.target).expanduser()
        try:
            # without O_NONBLOCK a named pipe would make us wait for a writer for ever
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                _refuse_unless_private(path, os.fstat(descriptor))
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    raw = file.read(MAX_SECRET_BYTES + 1)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise _Unusable(
                f"secret file {path} cannot be read ({reason}): write the secret into it, mode 0600"
            ) from error
        if len(raw) > MAX_SECRET_BYTES:
            raise _Unusable(f"secret file {path} is larger than {MAX_SECRET_BYTES} bytes; it should hold one secret")
        try:
            value = raw.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise _Unusable(f"secret file {path} is not UTF-8 text; write the secret as one line of text") from error
        if not value or not value.isprintable():
            raise _Unusable(f"secret file {path} must hold the secret as one line of text and nothing else")
        return value

    def __str__(self) -> str:
        return self.reference

    def __repr__(self) -> str:
        return f"SecretReference({self.reference!r})"

    def __len__(self) -> int:
        return len(self._value or "")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SecretReference) or self.reference != other.reference:
            return False
        if self._value is None or other._value is None:
            return self._value is other._value
        return secrets.compare_digest(self._value.encode(), other._value.encode())

    def __hash__(self) -> int:
        return hash(self.reference)


def _refuse_unless_private(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise _Unusable(f"secret file {path} is not a regular file; name a file that holds the secret alone")
    if mode & OPEN_TO_OTHERS:
        fix = f"chmod 600 {shlex.quote(str(path))}"
        raise _Unusable(f"secret file {path} is open to other users (mode {mode:04o}); run: {fix}")


class _Unusable(Exception):
    """Why a reference cannot be followed, for the user."""
