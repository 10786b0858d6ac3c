"""Rules of the switch: boxes that no longer hear each other, and one-way loss (nftables, bridge family)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path

from tests.lab.errors import LabError
from tests.lab.network import UPLINK, in_switch
from tests.lab.paths import BoxPaths, number_of
from tests.lab.processes import run

HOST = "host"  # the machine that the lab runs on, as a member of a partition
TABLE = "fleet_lab"


def _ports(member: str) -> str:
    """The set of bridge ports behind which a member sits: its cable, or the outer end of its wire."""
    if member == HOST:
        return f'{{ "{UPLINK}" }}'
    number_of(member)
    port = BoxPaths(member, Path()).port
    return f'{{ "{port}", "x-{member}" }}'


def drop_rule(source: str, target: str, loss: float = 1.0) -> str:
    """The rule that loses frames from `source` to `target`; `loss` is a probability, in steps of a thousandth.

    Raises:
        LabError: no box is called that, or `loss` is no probability.
    """
    if not 0 <= loss <= 1:
        raise LabError(f"a loss of {loss:g} is no probability from 0 to 1")
    chance = "" if loss == 1 else f" numgen random mod 1000 < {round(loss * 1000)}"
    return f"iifname {_ports(source)} oifname {_ports(target)}{chance} drop"


def partition_rules(groups: Collection[Collection[str]]) -> list[str]:
    """Rules that lose every frame between members of different groups, both ways.

    Raises:
        LabError: a member is in two groups.
    """
    members = [member for group in groups for member in group]
    if len(set(members)) != len(members):
        raise LabError(f"a member is named twice in {groups}")
    return [
        drop_rule(source, target) for group in groups for source in group for target in members if target not in group
    ]


def apply_rules(rules: Iterable[str]) -> None:
    """Make `rules` the only ones of the switch."""
    lines = [f"table bridge {TABLE}", f"delete table bridge {TABLE}"]  # the first makes the second never fail
    lines += [f"table bridge {TABLE} {{ chain between {{ type filter hook forward priority 0;"]
    lines += [*rules, "}", "}"]
    run(in_switch(["nft", "-f", "-"]), input_text="\n".join(lines) + "\n")
