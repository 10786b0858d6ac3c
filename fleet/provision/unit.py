"""The systemd unit of a box's supervisord. It needs neither uplink nor time: a box serves after any power cut."""

from __future__ import annotations

UNIT_NAME = "fleet-supervisord.service"
UNIT_DIRECTORY = "/etc/systemd/system"
RUNTIME_DIRECTORY = "fleet"  # /run/fleet, gone with every boot, so no stale socket outlives a power cut
RESTART_SECONDS = 2
# supervisord's RPC is asked three times within it, by the parent; it hangs for seconds on a slow card, not for so long.
WATCHDOG_SECONDS = 60


def quote(word: str) -> str:
    """A word of a unit's command line: specifiers (`%`), variables (`$`) and quotes taken literally.

    Raises:
        ValueError: a control character.
    """
    if any(ord(character) < 32 or ord(character) == 127 for character in word):
        raise ValueError(f"control character in {word!r}")
    plain = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{plain}"'


def render_unit(*, python: str, prefix: str, config_path: str, socket: str, user: str, stop_seconds: int) -> str:
    """The text of `fleet-supervisord.service`.

    Args:
        python: interpreter that has supervisor.
        prefix: root of everything on the box; stays writable wherever it lies.
        config_path: supervisord.conf. socket: of its RPC.
        user: service user; supervisord and every program run as it, nothing runs as root.
        stop_seconds: systemd kills what is left of the control group after that.

    The main process is a small parent of ours (`guards/parent.py`): it starts supervisord, and pings systemd only while
    supervisord's RPC answers. Hung guards cost nothing here: it asks supervisord alone.
    `OOMPolicy=continue`: when the kernel kills one program for memory, supervisord and the others live on.
    Hardening is limited to what cannot break compute, sensors, GPUs or an unusual prefix: no restriction of devices,
    /proc, /sys, /home or /tmp.
    """
    command = " ".join(
        quote(word)
        for word in (
            *(python, "-m", "guards.parent", "--socket", socket, "--"),
            *(python, "-m", "supervisor.supervisord", "--nodaemon", "--configuration", config_path),
        )
    )
    return f"""\
# Written by fleet; a change made here is found and undone by the next `fleet provision`.
[Unit]
Description=fleet: supervisor of this box's inference processes
After=network.target
StartLimitIntervalSec=0

[Service]
Type=notify
NotifyAccess=main
WatchdogSec={WATCHDOG_SECONDS}
Environment={quote(f"PYTHONPATH={prefix}/current/lib")} PYTHONDONTWRITEBYTECODE=1 PYTHONNOUSERSITE=1
User={user}
Group={user}
ExecStart={command}
Restart=always
RestartSec={RESTART_SECONDS}
OOMPolicy=continue
KillMode=control-group
TimeoutStopSec={stop_seconds}
RuntimeDirectory={RUNTIME_DIRECTORY}
RuntimeDirectoryMode=0700
UMask=0027
LimitNOFILE=16384
NoNewPrivileges=yes
ProtectSystem=true
ReadWritePaths={quote(prefix)}
RestrictSUIDSGID=yes
LockPersonality=yes

[Install]
WantedBy=multi-user.target
"""
