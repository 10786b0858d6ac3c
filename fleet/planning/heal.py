"""Plans when boxes die, come back or are drained: the one door to the planner for who keeps a site alive.

Pure, standard library only. Costs come from `fleet.planning.cost.BoxCost` (`BoxCost.measured` puts in what a stage has
measured); `alive` always names the boxes that may hold layers now, so a drained or held-down box is not among them.
"""

from __future__ import annotations

from fleet.planning.merge import merge, moved_layers
from fleet.planning.resplit import resplit
from fleet.planning.standby import standby, transition_missing, unsurvivable
from fleet.planning.whole import mebibytes, whole_plan

__all__ = [
    "mebibytes",
    "merge",
    "moved_layers",
    "resplit",
    "standby",
    "transition_missing",
    "unsurvivable",
    "whole_plan",
]
