"""Budgets hold for any sequence of actions, crashes and reboots."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guards.budgets import Budget, Ledger

BUDGETS = st.builds(
    Budget,
    most=st.integers(0, 5),
    window_seconds=st.floats(1, 1e5),
    apart_seconds=st.one_of(st.just(0.0), st.floats(0, 2e5)),
)


@given(budget=BUDGETS, waits=st.lists(st.floats(0, 5e4), max_size=60), reboots=st.lists(st.booleans(), max_size=60))
def test_never_more_than_the_budget_in_any_window(budget: Budget, waits: list[float], reboots: list[bool]) -> None:
    ledger, now, done = Ledger({}), 0.0, []
    for index, wait in enumerate(waits):
        now += wait
        if index < len(reboots) and reboots[index]:  # what is kept goes through the file's form
            ledger = Ledger.from_json(json.loads(json.dumps(ledger.to_json())))
        if ledger.next_seconds("restart", budget, now) <= 0:
            ledger = ledger.charged("restart", budget, now)
            done.append(now)
    for first in done:
        assert sum(0 <= each - first < budget.window_seconds for each in done) <= budget.most
    assert all(later - sooner >= budget.apart_seconds for sooner, later in itertools.pairwise(done))


@given(budget=BUDGETS.filter(lambda budget: budget.most > 0), spent=st.lists(st.floats(0, 1e5), max_size=10))
def test_it_pays_again_when_it_says(budget: Budget, spent: list[float]) -> None:
    ledger, now = Ledger.from_json({"restart": spent}), 1e5
    wait = ledger.next_seconds("restart", budget, now)
    assert wait > 0 or ledger.left("restart", budget, now) > 0
    assert ledger.next_seconds("restart", budget, now + wait + 1e-3) <= 0
    assert ledger.left("restart", budget, now + wait + 1e-3) > 0


def test_a_spent_budget_pays_nothing() -> None:
    budget = Budget(1, 3600.0)
    ledger = Ledger({}).charged("restart", budget, 0.0)
    with pytest.raises(ValueError, match="budget restart does not pay now"):
        ledger.charged("restart", budget, 3599.0)
    assert ledger.charged("restart", budget, 3600.0).left("restart", budget, 3600.0) == 0
    assert ledger.left("other", budget, 0.0) == 1


def test_what_no_longer_counts_is_forgotten() -> None:
    budget, ledger = Budget(2, 10.0, apart_seconds=1.0), Ledger({})
    for now in range(0, 1000, 6):
        ledger = ledger.charged("restart", budget, float(now))
    assert len(ledger.spent["restart"]) <= 3


def test_a_budget_of_nothing_never_pays() -> None:
    assert Ledger({}).left("restart", Budget(0, 10.0), 1e9) == 0
    assert Ledger({}).next_seconds("restart", Budget(0, 10.0), 1e9) == float("inf")
