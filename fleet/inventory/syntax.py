"""Syntax of single values: addresses, MACs, versions. Pure functions that pydantic calls before its own checks.

Each takes what the file says and returns the normal form, or raises `ValueError` with what was expected.
Values of another type are handed back untouched, so that pydantic says which type it wants.
"""

from __future__ import annotations

import ipaddress
import re

from pydantic import SecretStr
from pydantic_core import PydanticCustomError

HOST_NAME = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?)*"
)
JUMP_HOST = re.compile(
    r"(?:(?P<user>[A-Za-z_][A-Za-z0-9_.-]*)@)?(?:\[(?P<ip6>[^\]]+)\]|(?P<host>[^@:\[\]]+))(?::(?P<port>\d{1,5}))?"
)
PACKAGE_NAME = re.compile(r"[a-z0-9][a-z0-9+.-]+")  # Debian Policy, section 5.6.1
PYTHON_VERSION = re.compile(r"3\.(\d{1,2})")
OLDEST_PYTHON_MINOR = 10
MULTICAST_BIT = 0x01  # lowest bit of a MAC's first byte (IEEE 802)


def is_host(text: str) -> bool:
    """Whether a text is an IP address or a host name (RFC 1123)."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        looks_like_ipv4 = re.fullmatch(r"[\d.]+", text) is not None
        return not looks_like_ipv4 and HOST_NAME.fullmatch(text) is not None
    return True


def address(value: object) -> object:
    """An IP address or a host name, alone."""
    if not isinstance(value, str) or is_host(value):
        return value
    if re.fullmatch(r"[^:]+:\d+", value):
        host, _, port = value.partition(":")
        raise ValueError(f"an address without a port; write address: {host} and port: {port}")
    if "@" in value:
        user, _, host = value.partition("@")
        raise ValueError(f"an address without a user; write address: {host} and user: {user}")
    raise ValueError("an IP address or a host name, e.g. 192.168.10.21")


def mac_address(value: object) -> object:
    """A MAC address: six bytes with colons, hyphens or nothing between them → small letters with colons."""
    if not isinstance(value, str):
        return value
    digits = value.lower()
    for separator in (":", "-"):
        if re.fullmatch(rf"([0-9a-f]{{2}}{separator}){{5}}[0-9a-f]{{2}}", digits):
            digits = digits.replace(separator, "")
    if not re.fullmatch(r"[0-9a-f]{12}", digits):
        raise ValueError("a MAC address of six bytes, e.g. 02:77:00:00:00:01")
    if int(digits[:2], 16) & MULTICAST_BIT or digits == "0" * 12:
        raise ValueError("the MAC address of one network card; this one is all zero, broadcast or multicast")
    return ":".join(digits[i : i + 2] for i in range(0, 12, 2))


def python_version(value: object) -> object:
    """Major and minor version of CPython, or auto."""
    if not isinstance(value, str) or value == "auto":
        return value
    match = PYTHON_VERSION.fullmatch(value)
    if match is None:
        raise ValueError('major and minor version of Python, quoted, e.g. "3.11", or auto')
    if int(match[1]) < OLDEST_PYTHON_MINOR:
        raise ValueError(f'Python "3.{OLDEST_PYTHON_MINOR}" or newer')
    return value


def debian_package(value: object) -> object:
    """The name of a Debian package."""
    if isinstance(value, str) and not PACKAGE_NAME.fullmatch(value):
        raise ValueError("the name of a Debian package: small letters, digits, + . -, e.g. python3-venv")
    return value


def jump_hosts(value: object) -> object:
    """What ssh's ProxyJump takes: `[user@]host[:port]`, several with commas, or `none`."""
    if not isinstance(value, str) or value == "none":
        return value
    for hop in value.split(","):
        match = JUMP_HOST.fullmatch(hop)
        host = match and (match["host"] or match["ip6"])
        port = int(match["port"] or 22) if match else 0
        if not host or not is_host(host) or not 1 <= port <= 65535:
            raise ValueError("[user@]host[:port], several with commas and no spaces, or none")
    return value


def reference_only(value: object) -> object:
    """Refuse a secret that stands in the file itself."""
    if not isinstance(value, SecretStr):
        raise PydanticCustomError("literal_secret", "a reference, not the secret itself")
    return value
