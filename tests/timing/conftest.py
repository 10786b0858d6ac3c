"""A real sshd of this user; its fixture makes the boxes of these tests."""

from __future__ import annotations

from tests.ssh.conftest import sshd

__all__ = ["sshd"]
