"""One stage's engine: kept sequences, agreed lengths, what a new epoch takes over."""

from __future__ import annotations

import pytest

from stage_runtime.engine.measure import measure_head_seconds, measure_layer_seconds
from stage_runtime.engine.stage import EngineError, StageEngine
from stage_runtime.link.control import KvLength
from stage_runtime.link.messages import SamplingParameters
from stage_runtime.link.steps import PROBE_STEPS_ID, PROBE_WHOLE_ID, EntryStatus, Output, Step, StepEntry
from stage_runtime.model.kv_cache import KvCache
from stage_runtime.model.store import WeightStore
from tests.stage_runtime.engines import MAX_SEQUENCES, MAX_TOKENS, LocalRing, full_store
from tests.stage_runtime.tiny import LAYERS, TinyModel

GREEDY = SamplingParameters()


@pytest.fixture(scope="module")
def store(tied_model: TinyModel) -> WeightStore:
    return full_store(tied_model.directory, tied_model.digest)


@pytest.fixture
def ring(store: WeightStore) -> LocalRing:
    return LocalRing(store, (0, 2, LAYERS))


@pytest.fixture
def engine(ring: LocalRing) -> StageEngine:
    return ring.engines[0]


def feed(engine: StageEngine, sequence_id: int, position: int, rows: int) -> Step:
    entry = StepEntry(sequence_id, position, rows, Output.LAST)
    return engine.forward(engine.embed((entry,), list(range(position, position + rows)), 4))


def open_with(engine: StageEngine, **lengths: int) -> None:
    """Open sequences, named s1, s2 …, and feed each so many tokens."""
    for name, length in lengths.items():
        engine.open(int(name[1:]), GREEDY)
        feed(engine, int(name[1:]), 0, length)


def lengths(*pairs: tuple[int, int]) -> tuple[KvLength, ...]:
    return tuple(KvLength(*pair) for pair in pairs)


def test_a_broken_ring_keeps_caches_without_blocking_new_sequences(engine: StageEngine) -> None:
    open_with(engine, s1=20, s2=3)
    engine.open(3, GREEDY)  # nothing computed: nothing to keep
    held = engine.kv_bytes
    engine.keep_all()
    assert (engine.open_sequences, engine.kept_sequences, engine.kv_bytes) == (0, 2, held)
    assert engine.kept_lengths() == {1: 20, 2: 3}
    for number in range(10, 10 + MAX_SEQUENCES):
        engine.open(number, GREEDY)
    assert (engine.open_sequences, engine.kept_sequences, engine.kv_bytes) == (MAX_SEQUENCES, 0, 0)


def test_the_oldest_kept_ones_go_first(engine: StageEngine) -> None:
    open_with(engine, s1=5, s2=5, s3=5, s4=5)
    engine.keep_all()
    engine.open(5, GREEDY)
    engine.open(6, GREEDY)
    assert list(engine.kept_lengths()) == [3, 4]
    engine.agree(lengths((4, 5), (3, 5)))
    engine.open(7, GREEDY)
    assert list(engine.kept_lengths()) == [3], "the message's order counts, the same on every stage"


def test_the_probes_sequences_push_no_kept_one_out(engine: StageEngine) -> None:
    open_with(engine, s1=5, s2=5, s3=5, s4=5)
    engine.keep_all()
    engine.open(PROBE_WHOLE_ID, GREEDY)
    engine.open(PROBE_STEPS_ID, GREEDY)
    assert engine.kept_sequences == MAX_SEQUENCES


def test_a_kept_sequence_goes_on_behind_what_was_agreed(engine: StageEngine) -> None:
    open_with(engine, s1=9)
    engine.keep_all()
    engine.open(1, GREEDY, (1, 2), kv_len=7)
    assert engine.kept_sequences == 0
    assert feed(engine, 1, 7, 2).entries[0].status is EntryStatus.OK


@pytest.mark.parametrize(("kept", "kv_len", "is_at"), [(True, 0, 0), (True, 10, 0), (False, 4, 0)])
def test_what_is_not_kept_begins_empty_and_says_so(engine: StageEngine, kept: bool, kv_len: int, is_at: int) -> None:
    open_with(engine, s1=9)
    if kept:
        engine.keep_all()
    else:
        engine.free((1,))
    engine.open(1, GREEDY, kv_len=kv_len)
    entry = feed(engine, 1, kv_len, 1).entries[0]
    expected = EntryStatus.OK if kv_len == is_at else EntryStatus.POSITION_DIFFERS
    assert (entry.status, entry.kv_len) == (expected, is_at)


def test_a_survey_lowers_and_an_agreement_cuts(ring: LocalRing) -> None:
    first, second = ring.engines
    open_with(first, s1=20, s2=8, s3=4, s5=6)
    for sequence_id, rows in ((1, 12), (2, 8), (4, 5)):
        second.open(sequence_id, GREEDY)
        entry = StepEntry(sequence_id, 0, rows, Output.LAST)
        second.forward(first.embed((entry,), list(range(rows)), 4))
    first.keep_all()
    second.keep_all()
    surveyed = second.survey(lengths((1, 20), (2, 8), (3, 4), (5, 6)))
    assert surveyed == lengths((1, 12), (2, 8), (3, 0), (5, 0))
    for each in (first, second):
        each.agree(surveyed)
        assert each.kept_lengths() == {1: 12, 2: 8}
    with pytest.raises(EngineError, match="13 tokens of 1 were agreed, 12 are held"):
        first.agree(lengths((1, 13)))
    with pytest.raises(EngineError, match="5 tokens of 9 were agreed, 0 are held"):
        first.agree(lengths((9, 5)))


def test_a_new_epochs_engine_takes_kept_and_open_caches(ring: LocalRing, store: WeightStore) -> None:
    old = ring.engines[0]
    open_with(old, s1=9)
    old.keep_all()
    open_with(old, s2=4)
    held = old.kv_bytes
    new = StageEngine(store.config, store.weights(ring.stages[0]), 16, MAX_SEQUENCES, MAX_TOKENS)
    new.take_over(old)
    assert (old.open_sequences, old.kept_sequences, old.kv_bytes) == (0, 0, 0)
    assert (new.kept_lengths(), new.kv_bytes) == ({1: 9, 2: 4}, held)
    small = StageEngine(store.config, store.weights(ring.stages[0]), 16, 1, MAX_TOKENS)
    small.take_over(new)
    assert small.kept_lengths() == {2: 4}, "a plan for fewer sequences keeps the newest"
    with pytest.raises(ValueError, match="caches of 4 layers"):
        new.take_over(ring.engines[1])


def test_free_drops_open_and_kept_ones(engine: StageEngine) -> None:
    open_with(engine, s1=9, s2=3)
    engine.keep_all()
    open_with(engine, s3=3)
    engine.free((1, 3, 77))
    assert (engine.open_sequences, engine.kept_lengths()) == (0, {2: 3})
    engine.free_kept()
    assert engine.kv_bytes == 0


def test_too_many_open_sequences_are_refused(engine: StageEngine) -> None:
    for number in range(MAX_SEQUENCES + 2):
        engine.open(number, GREEDY)
    with pytest.raises(EngineError, match="more than 4 sequences"):
        engine.open(99, GREEDY)
    with pytest.raises(EngineError, match="open already"):
        engine.free((0,))
        engine.open(1, GREEDY)


def test_what_no_first_stage_would_open_is_refused(engine: StageEngine, store: WeightStore) -> None:
    with pytest.raises(EngineError, match="choice 4294967296 is no u32"):
        engine.open(1, SamplingParameters(choice=2**32))
    with pytest.raises(EngineError, match="outside the vocabulary"):
        engine.open(1, GREEDY, (3, store.config.vocab_size))


def test_a_cache_is_cut_to_any_shorter_length_only(store: WeightStore) -> None:
    cache = KvCache(store.config, 1, 8)
    cache.reserve(5)
    cache.advance(5)
    cache.truncate(2)
    assert cache.length == 2
    for length in (3, -1):
        with pytest.raises(ValueError, match=f"cut to {length}"):
            cache.truncate(length)


def test_measured_seconds_are_positive_and_leave_weights_alone(ring: LocalRing, store: WeightStore) -> None:
    weights = store.weights(ring.stages[0])
    assert weights.head is not None
    assert measure_layer_seconds(store.config, *weights.layers) > 0
    assert measure_layer_seconds(store.config, weights.layers[0]) > 0
    assert measure_head_seconds(store.config, weights.head) > 0
