"""What the tests of self-healing judge by: counts of lost, repeated and changed tokens, near-ties, faults by seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models import smollm2_directory
from tests.site.judge import Judge, Reference, count_differences, first_difference, is_near_tie
from tests.site.streams import PROMPTS, Run, Stream
from tests.site.test_soak_healing import MIXED_FAULTS, mixed_case

ANSWER = [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("got", "position", "counts"),
    [
        pytest.param([5, 6, 8, 9], 2, (1, 0, 0), id="lost"),
        pytest.param([5, 6, 7, 7, 8, 9], 3, (0, 1, 0), id="repeated"),
        pytest.param([5, 6, 1, 8, 9], 2, (0, 0, 1), id="changed"),
        pytest.param([5, 6, 7], 3, (2, 0, 0), id="cut"),
        pytest.param([5, 6, 7, 8, 9], 5, (0, 0, 1), id="text-alone"),
    ],
)
def test_differences_are_counted(got: list[int], position: int, counts: tuple[int, int, int]) -> None:
    assert first_difference(ANSWER, got) == position
    assert count_differences(ANSWER, got) == counts


@pytest.mark.parametrize(
    ("margin", "near"),
    [
        ({"gap": 2e-4}, True),
        ({"gap": 3e-4}, False),
        ({"boundary": 1e-4}, True),
        ({"boundary": 2e-4, "top_k": 1}, False),
    ],
)
def test_a_near_tie_is_two_logits_within_twice_the_difference_or_a_bound_within_it(
    margin: dict[str, float], near: bool
) -> None:
    assert is_near_tie(margin, 1.1e-4) is near


@pytest.fixture(scope="module")
def model() -> Path:
    return smollm2_directory()


def test_a_wrong_token_is_no_near_tie_and_a_torn_stream_has_failed(model: Path) -> None:
    wanted = Run([Stream(prompt, list(ANSWER), text="x", finish="length") for prompt in PROMPTS])
    judge = Judge(wanted, Reference(model))
    assert judge.compare(wanted, 1e-3).is_equal
    wrong, torn = PROMPTS[0], PROMPTS[7]
    got = Run(
        [
            Stream(wrong, [5, 6, 1, 8, 9], text="y", finish="length"),
            Stream(torn, [5, 6], text="x", error="APIError: the ring broke"),
        ]
    )
    result = judge.compare(got, 1e-5)
    assert (result.changed, len(result.failed), result.is_equal) == (1, 1, False)
    assert [difference.position for difference in result.differences] == [2]
    assert "DIFFERENT at token 2: 7 and 1" in str(result)


def test_mixed_faults_are_the_same_in_every_run_and_of_every_kind() -> None:
    cases = [mixed_case(number) for number in range(MIXED_FAULTS)]
    assert cases == [mixed_case(number) for number in range(MIXED_FAULTS)]
    kinds = {case.kind for case in cases}
    assert kinds == {"kill", "power-cut", "link-cut", "stop", "coordinator-kill", "gateway-kill"}
    assert {case.box for case in cases} == {"", "box1", "box2", "box3"}
