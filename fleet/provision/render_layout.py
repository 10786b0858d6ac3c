"""Where things lie on a box, and how its processes reach each other. Pure."""

from __future__ import annotations

import hashlib
import ipaddress
import re
from dataclasses import dataclass

from fleet.errors import ExitCode, FleetError
from fleet.inventory.sitefile import SiteFile

REFUSED_IN_PREFIX = re.compile('[:"\x00-\x1f\x7f]')
SERVICE_USER = "fleet"
RUN_DIRECTORY = "/run/fleet"
LOG_DIRECTORY = "/var/log/fleet"
# written by systemd-timesyncd once the clock is set; absent under other daemons, which counts as not synchronised
CLOCK_SYNCHRONISED_FILE = "/run/systemd/timesync/synchronized"


@dataclass(frozen=True)
class BoxLayout:
    """Paths of one box.

    Attributes:
        prefix: root of everything that survives a boot.
        run_directory: unix sockets and the pid file.
        user: service user; None in local mode, where all belongs to the operator.
    """

    prefix: str
    run_directory: str
    user: str | None

    @property
    def local(self) -> bool:
        """Directories of this machine, without root."""
        return self.user is None

    @property
    def owner(self) -> str:
        """Who owns what programs write; not looked at in local mode."""
        return self.user or "root"

    @property
    def etc(self) -> str:
        """Configuration of the active release."""
        return f"{self.prefix}/current/etc"

    @property
    def supervisor_config(self) -> str:
        """supervisord.conf of the active release."""
        return f"{self.etc}/supervisord.conf"

    @property
    def supervisor_socket(self) -> str:
        """supervisord's XML-RPC."""
        return f"{self.run_directory}/supervisor.sock"

    @property
    def stage_socket(self) -> str:
        """The stage's admin socket."""
        return f"{self.run_directory}/stage.sock"

    @property
    def api_keys(self) -> str:
        """Digests of the gateway's API keys."""
        return f"{self.prefix}/secrets/api_keys.json"

    @property
    def log(self) -> str:
        """Logs of supervisord and its programs: where an administrator looks for them."""
        return f"{self.prefix}/log" if self.local else LOG_DIRECTORY

    def state_of(self, program: str) -> str:
        """What a program keeps: the stage's and the coordinator's logs of epochs, the gateway's journal."""
        return f"{self.prefix}/state/{'journal' if program == 'gateway' else program}"

    @property
    def tls(self) -> dict[str, str]:
        """The `tls` object of a configuration."""
        pki = f"{self.prefix}/pki"
        return {"ca": f"{pki}/ca.crt", "certificate": f"{pki}/box.crt", "key": f"{pki}/box.key"}

    def model(self, digest: str) -> str:
        """Directory of a model."""
        return f"{self.prefix}/models/{digest[:16]}"

    def environment(self, digest: str) -> str:
        """Virtual environment of a lock."""
        return f"{self.prefix}/envs/{digest[:16]}"


def layout_of(site_file: SiteFile, box: str, uid: int) -> BoxLayout:
    """Layout of a box.

    Args:
        uid: of the operator, part of a local site's socket directory. It does not lie below the prefix, because a
            socket's path ends at 107 bytes.
    """
    prefix = site_file.prefix_of(box)
    if site_file.site.boxes[box].connection == "local":
        return BoxLayout(prefix, f"{local_run_root(site_file, uid)}/{box}", None)
    return BoxLayout(prefix, RUN_DIRECTORY, SERVICE_USER)


def check_local_prefix(site_file: SiteFile) -> None:
    """Refuse a local site's root that programs could not be started from: PYTHONPATH is split at colons, and
    supervisor's format cannot express the others.

    Raises:
        FleetError: names the character.
    """
    root = str(site_file.resolve(site_file.site.prefix))
    local = any(box.connection == "local" for box in site_file.site.boxes.values())
    bad = REFUSED_IN_PREFIX.search(root)
    if local and bad:
        raise FleetError(
            f"{site_file.file}: prefix: {root!r} has a {bad.group()!r}, which no program's environment can hold",
            hint="set prefix in the inventory to a directory without it, e.g. prefix: /var/tmp/fleet",
            exit_code=ExitCode.INVALID_INVENTORY,
        )


def local_run_root(site_file: SiteFile, uid: int) -> str:
    """Directory that holds the socket directories of a local site's boxes."""
    root = str(site_file.resolve(site_file.site.prefix))
    return f"/tmp/fleet-{uid}-{hashlib.sha256(root.encode()).hexdigest()[:8]}"  # noqa: S108 - 0700, owner checked


def listen_host(address: str, *, local: bool) -> str:
    """Address that a box's servers bind: loopback in local mode, otherwise every address of the address's family."""
    if local:
        return "127.0.0.1"
    try:
        return "::" if ipaddress.ip_address(address).version == 6 else "0.0.0.0"  # noqa: S104 - mutual TLS
    except ValueError:
        return "0.0.0.0"  # noqa: S104


def server_name(site: str, box: str) -> str:
    """The name that a box's certificate is checked against, wherever the box is reached."""
    return f"{box}.{site}.fleet.internal"


def alternative_names(site: str, box: str, address: str) -> tuple[str, ...]:
    """Subject alternative names of a box's certificate, each once."""
    names = [f"DNS:{server_name(site, box)}"]
    try:
        names.append(f"IP:{ipaddress.ip_address(address)}")
    except ValueError:
        names.append(f"DNS:{address}")
    names += ["DNS:localhost", "IP:127.0.0.1"]
    return tuple(dict.fromkeys(names))
