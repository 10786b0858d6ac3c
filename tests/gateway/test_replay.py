"""An answer told again from its journal is the answer that was told: same events, same bytes, at any cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fleet.gateway.entries import End, Entry, Failed, Token, decode_entry, encode_entry
from fleet.gateway.record import AdmissionRecord
from fleet.gateway.replay import DONE, EventFold, WholeFold, make_fold
from fleet.gateway.requests import GenerationOptions
from fleet.gateway.vocabulary import Vocabulary
from stage_runtime.link.control import decode_control, encode_control
from stage_runtime.link.messages import SamplingParameters, TokenEvent, TokenLogprob
from tests.gateway.site import write_model

TEXTS = ["the lazy dog € jumps", "a😀b stop here", "xx stopstop", "é", ""]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    directory = tmp_path_factory.mktemp("replay") / "model"
    write_model(directory)
    return Vocabulary(directory)


def record(endpoint: str, choices: int, stop: tuple[str, ...], logprobs: int | None, **flags: bool) -> AdmissionRecord:
    options = GenerationOptions(
        model="tiny",
        max_tokens=50,
        sampling=SamplingParameters(temperature=0.5, seed=2**63 + 1, logprobs=logprobs),
        seeded=True,
        stop=stop,
        choices=choices,
        stream=True,
        include_usage=flags.get("usage", False),
        token_ids=flags.get("token_ids", False),
    )
    return AdmissionRecord(
        stream_id="s-1",
        endpoint="chat" if endpoint == "chat" else "completions",
        created=17,
        fingerprint="fp",
        pipeline="main",
        model_digest="ab" * 32,
        key_name="tester",
        request_id="r",
        sequence_ids=tuple(range(choices)),
        prompt=(5, 6),
        max_tokens=50,
        options=options,
    )


def events_of(wanted: AdmissionRecord, vocabulary: Vocabulary, entries: list[Entry]) -> list[str]:
    fold = EventFold(wanted, vocabulary)
    return [data if isinstance(data, str) else json.dumps(data) for entry in entries for data in fold.push(entry)]


@st.composite
def answers(draw: st.DrawFn) -> tuple[dict[str, Any], list[Any], list[int], int]:
    """Options, what each choice says (token ids, or a text to encode), the order of arrival, a place to fail."""
    choices = draw(st.integers(1, 3))
    said = draw(
        st.lists(
            st.one_of(st.lists(st.integers(0, 390), max_size=8), st.sampled_from(TEXTS).map(lambda text: [text])),
            min_size=choices,
            max_size=choices,
        )
    )
    options = {
        "endpoint": draw(st.sampled_from(["chat", "completions"])),
        "choices": choices,
        "stop": tuple(draw(st.lists(st.sampled_from(["stop", "lazy", " h", "€", "op"]), max_size=2))),
        "logprobs": draw(st.sampled_from([None, 0, 2])),
        "usage": draw(st.booleans()),
        "token_ids": draw(st.booleans()),
    }
    order = draw(st.lists(st.integers(0, choices - 1), max_size=30))
    return options, said, order, draw(st.integers(-1, 12))


def entries_of(wanted: AdmissionRecord, vocabulary: Vocabulary, drawn: Any) -> list[Entry]:
    """The entries an author writes, by the rules of `Generation`."""
    _, said, order, fails_at = drawn
    fold = make_fold(wanted, vocabulary)
    logprobs = wanted.options.sampling.logprobs
    left: list[list[int]] = []
    for piece in said:
        is_text = piece and isinstance(piece[0], str)
        left.append(list(vocabulary.encode(piece[0], add_special_tokens=False)) if is_text else list(piece))
    counts = [0] * len(left)
    entries: list[Entry] = []
    for choice in [*order, *(n for n in range(len(left)) for _ in range(60))]:
        if fold.ended or fold.finished(choice):
            continue
        entry: Entry
        if len(entries) == fails_at:
            entry = Failed(503, "gone", None, "unavailable", "unavailable", 2.5)
        elif not left[choice]:
            entry = End(choice, "stop")
        else:
            token, index = left[choice].pop(0), counts[choice]
            counts[choice] += 1
            others = tuple(TokenLogprob(n, -1.0 / (n + 3)) for n in range(logprobs or 0))
            entry = Token(choice, TokenEvent(index, token, None if logprobs is None else -0.1 * index, others))
        entries.append(entry)
        fold.push(entry)
    return entries


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=answers(), cut=st.integers(0, 100), after=st.integers(0, 60))
def test_any_restart_and_any_last_event_give_exactly_the_rest(
    vocabulary: Vocabulary, drawn: Any, cut: int, after: int
) -> None:
    wanted = record(**drawn[0])
    entries = entries_of(wanted, vocabulary, drawn)
    told = events_of(wanted, vocabulary, entries)
    assert told[-1] == DONE
    assert told.count(DONE) == 1
    # a restart behind the entry `cut`: what is before it comes from the journal, what is behind from the new author
    journalled = [decode_entry(encode_entry(entry)) for entry in entries[:cut]]
    assert journalled == entries[:cut]
    kept = decode_control(AdmissionRecord, encode_control(wanted))
    assert kept == wanted
    author = make_fold(kept, vocabulary)
    for entry in journalled:
        author.push(entry)
    for choice in range(wanted.options.choices):
        said = [e.event for e in entries[:cut] if isinstance(e, Token) and e.choice == choice]
        assert author.generated(choice) == tuple(event.token_id for event in said)
    assert events_of(kept, vocabulary, journalled + entries[cut:])[after:] == told[after:]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=answers())
def test_the_whole_answer_says_what_the_stream_says(vocabulary: Vocabulary, drawn: Any) -> None:
    wanted = record(**{**drawn[0], "endpoint": "completions"})
    entries = entries_of(wanted, vocabulary, (*drawn[:3], -1))
    whole = WholeFold(wanted, vocabulary)
    for entry in entries:
        whole.push(entry)
    texts = [""] * wanted.options.choices
    for event in events_of(wanted, vocabulary, entries)[:-1]:
        for choice in json.loads(event)["choices"]:
            texts[choice["index"]] += choice["text"]
    body = whole.body()
    assert [choice["text"] for choice in body["choices"]] == texts
    assert body["usage"]["completion_tokens"] == sum(isinstance(entry, Token) for entry in entries)


@given(st.text(max_size=40) | st.lists(st.integers() | st.text(max_size=4), max_size=6).map(json.dumps))
def test_what_is_no_entry_is_refused(text: str) -> None:
    try:
        entry = decode_entry(text)
    except ValueError:
        return
    assert encode_entry(entry)
