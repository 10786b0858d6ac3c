from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from guards.clock.agree import agree
from guards.clock.packet import Answer


def said(server: str, offset: float, *, delay: float = 0.002, distance: float = 0.005, free: bool = False) -> Answer:
    return Answer(server, offset, delay, distance, stratum=2, leap=0, free_running=free)


def test_nobody() -> None:
    assert agree([]).best is None and "no time server" in agree([]).reason


def test_one_alone_is_believed() -> None:
    only = said("a", 3.0)
    assert agree([only]).best == only


def test_two_that_differ_are_not() -> None:
    agreement = agree([said("a", 0.0), said("b", 1.0)])
    assert agreement.best is None and agreement.falsetickers == ("a", "b")
    assert "a: +0.000000 s, b: +1.000000 s" in agreement.reason


def test_two_that_agree_and_one_that_lies() -> None:
    near = said("b", 0.001, delay=0.001)
    agreement = agree([said("a", 0.0), near, said("liar", -5.0, delay=0.0)])
    assert agreement.best == near and agreement.falsetickers == ("liar",)


def test_a_server_that_knows_its_source_goes_before_a_nearer_one_that_does_not() -> None:
    far = said("far", 0.0, delay=0.01)
    assert agree([said("near", 0.0, delay=0.001, free=True), far]).best == far


honest_answers = st.lists(st.tuples(st.floats(-1, 1), st.floats(0, 0.5)), min_size=2, max_size=7)


@given(honest=honest_answers, lies=st.lists(st.floats(10, 1e6), max_size=6), true=st.floats(-100, 100), data=st.data())
def test_a_majority_of_honest_servers_is_found_whatever_the_others_say(
    honest: list[tuple[float, float]], lies: list[float], true: float, data: st.DataObject
) -> None:
    lies = lies[: len(honest) - 1]
    answers = [
        said(f"honest{at}", true + share * distance, distance=distance) for at, (share, distance) in enumerate(honest)
    ]
    answers += [said(f"liar{at}", true + lie, distance=0.1) for at, lie in enumerate(lies)]
    agreement = agree(data.draw(st.permutations(answers)))
    assert agreement.best is not None and agreement.best.server.startswith("honest")
    assert set(agreement.falsetickers) == {f"liar{at}" for at in range(len(lies))}
