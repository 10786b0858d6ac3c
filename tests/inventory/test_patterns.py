"""`--limit`: which boxes a pattern means."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet.errors import ExitCode, FleetError
from fleet.inventory.loader import load_site
from fleet.inventory.patterns import select

SITE = load_site(Path(__file__).parents[2] / "inventory" / "site.yaml", resolve_secrets=False).site
BOXES = list(SITE.boxes)


@pytest.mark.parametrize(
    ("pattern", "boxes"),
    [
        ("", "jetson-1 pi-1 pi-2 rk-1 ipc-1"),
        (" , ", "jetson-1 pi-1 pi-2 rk-1 ipc-1"),
        ("*", "jetson-1 pi-1 pi-2 rk-1 ipc-1"),
        ("pi-1", "pi-1"),
        ("pi-2,pi-1", "pi-1 pi-2"),
        ("pi-*", "pi-1 pi-2"),
        ("pi-[!1]", "pi-2"),
        ("?i-1", "pi-1"),
        ("pi-*,!pi-2", "pi-1"),
        ("!pi-2,pi-*", "pi-1"),
        ("!pi-*", "jetson-1 rk-1 ipc-1"),
        ("! pi-*, ! rk-1", "jetson-1 ipc-1"),
        ("role:stage", "jetson-1 pi-1 pi-2 rk-1"),
        ("role:gateway", "ipc-1"),
        ("role:stage,!label:rack", "rk-1"),
        ("label:rack", "jetson-1 pi-1 pi-2"),
        ("label:rack=a", "jetson-1 pi-1"),
        ("label:rack=*", "jetson-1 pi-1 pi-2"),
        ("label:rack=a,!jetson-1,ipc-1", "pi-1 ipc-1"),
        ("@failed", "pi-1 rk-1"),
        ("pi-*,@failed", "pi-1 pi-2 rk-1"),
        ("!@failed", "jetson-1 pi-2 ipc-1"),
        ("role:stage,!@failed", "jetson-1 pi-2"),
    ],
)
def test_selection(pattern: str, boxes: str) -> None:
    assert select(SITE, pattern, failed=["rk-1", "pi-1", "gone"]) == boxes.split()


@pytest.mark.parametrize(
    ("pattern", "message", "hint"),
    [
        ("pi-3", '--limit: no box "pi-3" in site plant-7', 'did you mean "pi-2"?'),
        ("jetsn-1", '--limit: no box "jetsn-1" in site plant-7', 'did you mean "jetson-1"?'),
        ("!jetsn-1", '--limit: no box "jetsn-1" in site plant-7', 'did you mean "jetson-1"?'),
        ("zzz*", '--limit: no box "zzz*" in site plant-7', "valid here: jetson-1, pi-1, pi-2, rk-1, ipc-1"),
        ("role:stge", '--limit: no role "stge"', 'did you mean "stage"?'),
        ("label:rak=a", '--limit: no box has a label "rak"', 'did you mean "rack"?'),
        ("label:rack=c", "--limit: no box has the label rack=c", "valid here: a, b"),
        ("@faild", '--limit: read "@faild": the only group is @failed', "write @failed"),
        ("!", '--limit: no box "" in site plant-7', "valid here: jetson-1, pi-1, pi-2, rk-1, ipc-1"),
        ("pi-1,!pi-*", '--limit "pi-1,!pi-*": it leaves no box', "boxes of plant-7: jetson-1, pi-1, pi-2, rk-1, ipc-1"),
        ("@failed", '--limit "@failed": no box failed in the last run', "boxes of plant-7: jetson-1, pi-1, pi-2"),
    ],
)
def test_what_names_nothing_is_a_usage_error(pattern: str, message: str, hint: str) -> None:
    with pytest.raises(FleetError) as caught:
        select(SITE, pattern)
    assert caught.value.exit_code == ExitCode.USAGE
    assert caught.value.message == message
    assert caught.value.hint.startswith(hint)


TERM = st.sampled_from([*BOXES, "pi-*", "role:stage", "role:gateway", "label:rack", "label:rack=a", "@failed"])


@given(added=st.lists(TERM, max_size=4), removed=st.lists(TERM, max_size=4), failed=st.sets(st.sampled_from(BOXES)))
def test_order_of_terms_does_not_matter(added: list[str], removed: list[str], failed: set[str]) -> None:
    def outcome(terms: list[str]) -> list[str]:
        try:
            return select(SITE, ",".join(terms), failed)
        except FleetError:
            return []

    excluded = ["!" + term for term in removed]
    chosen = outcome(added + excluded)
    assert chosen == outcome(excluded + added[::-1])
    assert chosen == [box for box in BOXES if box in chosen]
    assert not removed or not set(chosen) & set(outcome(removed))


@given(st.text(max_size=60))
def test_any_text_selects_boxes_or_is_a_usage_error(pattern: str) -> None:
    try:
        chosen = select(SITE, pattern)
    except FleetError as error:
        assert error.exit_code == ExitCode.USAGE
        assert error.hint
        return
    assert chosen
    assert set(chosen) <= set(BOXES)
