"""The compute side of one stage: layers, KV caches and samplers. Called from the compute thread only."""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import dataclass, replace

import torch

from stage_runtime.checkpoint.manifest import LlamaConfig
from stage_runtime.engine.probe import PROBE_TOKENS, Probe
from stage_runtime.engine.requests import sampling_problem
from stage_runtime.engine.sampling import Sampler
from stage_runtime.link.control import KvLength
from stage_runtime.link.messages import SamplingParameters
from stage_runtime.link.steps import (
    PROBE_STEPS_ID,
    PROBE_WHOLE_ID,
    EntryStatus,
    Output,
    Step,
    StepEntry,
    TokenKind,
    TokenResult,
    Tokens,
    WireDtype,
)
from stage_runtime.model.kv_cache import KvCache
from stage_runtime.model.llama import Decoder, Span
from stage_runtime.model.load import StageWeights

_WIRE_TO_TORCH = {WireDtype.FP32: torch.float32, WireDtype.FP16: torch.float16, WireDtype.BF16: torch.bfloat16}
_PROBE_IDS = (PROBE_WHOLE_ID, PROBE_STEPS_ID)


class EngineError(Exception):
    """A neighbour asked for what the protocol does not allow; the ring has to form anew."""


@dataclass
class _Sequence:
    """What a stage keeps of a sequence."""

    cache: KvCache
    sampler: Sampler


class StageEngine:
    """Computes micro-batches of one stage.

    When the ring breaks, its sequences become *kept*: their caches wait for the gateway to submit them again.

    Args:
        config: the model.
        weights: what this stage holds.
        kv_block_tokens: KV caches grow by multiples of this.
        max_sequences: most sequences open at once (the plan's; the probe's two come on top).
        max_tokens: of one sequence, prompt and answer together (the plan's, or the probe's if that is longer).

    Attributes:
        kv_bytes: bytes of all KV caches, kept ones included.
    """

    def __init__(
        self, config: LlamaConfig, weights: StageWeights, kv_block_tokens: int, max_sequences: int, max_tokens: int
    ) -> None:
        self.config = config
        self.kv_bytes = 0
        self._weights = weights
        self._decoder = Decoder(config, weights.layers)
        self._kv_block_tokens = kv_block_tokens
        self._max_sequences = max_sequences
        self._max_tokens = max(max_tokens, PROBE_TOKENS)
        self._sequences: dict[int, _Sequence] = {}
        self._kept: dict[int, KvCache] = {}  # oldest first
        self._probe = Probe()

    @property
    def open_sequences(self) -> int:
        """Sequences that are computed here."""
        return len(self._sequences)

    @property
    def kept_sequences(self) -> int:
        """Sequences of a broken ring whose caches wait."""
        return len(self._kept)

    def open(
        self, sequence_id: int, sampling: SamplingParameters, generated: tuple[int, ...] = (), kv_len: int = 0
    ) -> None:
        """Make room for a sequence, or go on with a kept one.

        A cache that is not kept any more, because newer sequences needed its room, is no error: the sequence begins
        empty, and its first step answers with the position that it is at (POSITION_DIFFERS).

        Args:
            generated: tokens of the answer so far; penalties and the random stream go on behind them.
            kv_len: tokens that every stage has kept; the cache is cut to them. 0 begins with an empty cache.

        Raises:
            EngineError: it is open already, there are too many, a sampling parameter is out of range, or a token of
                the answer is not in the vocabulary.
        """
        if sequence_id in self._sequences:
            raise EngineError(f"sequence {sequence_id} is open already")
        if len(self._sequences) >= self._max_sequences + len(_PROBE_IDS):
            raise EngineError(f"more than {self._max_sequences} sequences are open")
        if problem := sampling_problem(sampling):
            raise EngineError(f"sequence {sequence_id}: {problem}")
        if any(token >= self.config.vocab_size for token in generated):
            raise EngineError(f"sequence {sequence_id} goes on behind tokens outside the vocabulary")
        cache = self._kept.pop(sequence_id, None)
        if cache is not None and 0 < kv_len <= cache.length:
            cache.truncate(kv_len)
        else:
            cache = KvCache(self.config, len(self._weights.layers), self._kv_block_tokens)
        sampler = Sampler(sampling, Counter(generated), len(generated))
        self._sequences[sequence_id] = _Sequence(cache, sampler)
        if sequence_id == PROBE_WHOLE_ID:
            self._probe = Probe()
        self._drop_oldest_kept()
        self._count_kv()

    def free(self, sequence_ids: tuple[int, ...]) -> None:
        """Drop sequences, open or kept; unknown ids are no error (a cancel may cross their end)."""
        for sequence_id in sequence_ids:
            self._sequences.pop(sequence_id, None)
            self._kept.pop(sequence_id, None)
        self._count_kv()

    def keep_all(self) -> None:
        """The ring broke: every open sequence becomes a kept one, the probe's end."""
        for sequence_id, sequence in self._sequences.items():
            if sequence_id not in _PROBE_IDS and sequence.cache.length:
                self._kept[sequence_id] = sequence.cache
        self._sequences.clear()
        self._probe = Probe()
        self._drop_oldest_kept()
        self._count_kv()

    def free_kept(self) -> None:
        """Drop the kept sequences: nobody has submitted them again."""
        self._kept.clear()
        self._count_kv()

    def kept_lengths(self) -> dict[int, int]:
        """Tokens that the cache of each kept sequence holds."""
        return {sequence_id: cache.length for sequence_id, cache in self._kept.items()}

    def survey(self, lengths: tuple[KvLength, ...]) -> tuple[KvLength, ...]:
        """Lower what the stages before hold of each sequence to what this one holds; 0 if it is not kept here."""
        own = self.kept_lengths()
        return tuple(
            KvLength(length.sequence_id, min(length.kv_len, own.get(length.sequence_id, 0))) for length in lengths
        )

    def agree(self, lengths: tuple[KvLength, ...]) -> None:
        """Cut kept caches to what all stages hold; those that are not named, or named with 0, are dropped.

        Raises:
            EngineError: more was agreed than this stage holds.
        """
        agreed: dict[int, KvCache] = {}
        for length in lengths:
            if not length.kv_len:
                continue
            cache = self._kept.get(length.sequence_id)
            if cache is None or cache.length < length.kv_len:
                held = cache.length if cache else 0
                raise EngineError(f"{length.kv_len} tokens of {length.sequence_id} were agreed, {held} are held")
            cache.truncate(length.kv_len)
            agreed[length.sequence_id] = cache
        self._kept = agreed  # in the order of the message, so that all stages drop the same ones first
        self._count_kv()

    def take_over(self, other: StageEngine) -> None:
        """Take kept and open caches of an older epoch's engine with the same layers; it is empty afterwards.

        Raises:
            ValueError: it has another number of layers.
        """
        own, others = len(self._weights.layers), len(other._weights.layers)
        if own != others:
            raise ValueError(f"caches of {others} layers are no caches of {own}")
        other.keep_all()
        self._kept = {**other._kept, **self._kept}
        other.free_kept()
        self._drop_oldest_kept()
        self._count_kv()

    def embed(self, entries: tuple[StepEntry, ...], token_ids: list[int], batch_limit: int) -> Step:
        """First stage: token ids → a step with their embeddings.

        Args:
            token_ids: of all entries, one after another.
        """
        if self._weights.embedding is None:
            raise EngineError("this stage holds no embedding")
        rows = self._weights.embedding.read(token_ids)
        return Step(entries, _to_bytes(rows), self.config.hidden_size, batch_limit)

    @torch.inference_mode()
    def forward(self, step: Step) -> Step:
        """Run the own layers over a micro-batch.

        Entries whose position is not this stage's KV length are not computed; they go on without rows and say so.

        Raises:
            EngineError: a sequence would become longer than any may.
        """
        hidden = _from_bytes(step)
        entries: list[StepEntry] = []
        spans: list[Span] = []
        pieces: list[torch.Tensor] = []
        start = 0
        for entry in step.entries:
            rows = hidden[start : start + entry.rows]
            start += entry.rows
            if entry.position + entry.rows > self._max_tokens:
                raise EngineError(f"sequence {entry.sequence_id} with more than {self._max_tokens} tokens")
            sequence = self._sequences.get(entry.sequence_id)
            kv_len = sequence.cache.length if sequence else 0
            if entry.status is EntryStatus.OK and (sequence is None or kv_len != entry.position):
                entry = replace(entry, rows=0, status=EntryStatus.POSITION_DIFFERS, kv_len=kv_len)  # noqa: PLW2901
            elif sequence is not None and entry.rows:
                spans.append(Span(sequence.cache, entry.rows))
                pieces.append(rows)
            entries.append(entry)
        if not spans:
            return replace(step, entries=tuple(entries), hidden=b"")
        if self._weights.layers:
            hidden = self._decoder(torch.cat(pieces) if len(pieces) > 1 else pieces[0], spans)
            self._count_kv()
        return replace(step, entries=tuple(entries), hidden=_to_bytes(hidden))

    def outputs(self, step: Step) -> Step:
        """Last stage: keep only the rows that the head has to see."""
        hidden = _from_bytes(step)
        entries, pieces, start = [], [], 0
        for entry in step.entries:
            end = start + entry.rows
            rows = {Output.NONE: 0, Output.LAST: min(1, entry.rows), Output.ALL: entry.rows}[entry.output]
            pieces.append(hidden[end - rows : end])
            entries.append(replace(entry, rows=rows))
            start = end
        data = _to_bytes(torch.cat(pieces)) if pieces else b""
        return replace(step, entries=tuple(entries), hidden=data)

    @torch.inference_mode()
    def head(self, step: Step) -> Tokens:
        """The head's holder: the rows of `outputs` → sampled tokens."""
        if self._weights.head is None:
            raise EngineError("this stage holds no head")
        hidden = _from_bytes(step)
        logits = self._weights.head.logits(hidden) if hidden.shape[0] else hidden
        results, start = [], 0
        for entry in step.entries:
            rows = logits[start : start + entry.rows]
            start += entry.rows
            results.append(self._result(entry, rows))
        return Tokens(tuple(results), step.batch_limit)

    def _result(self, entry: StepEntry, logits: torch.Tensor) -> TokenResult:
        if entry.status is not EntryStatus.OK or not entry.rows:
            return TokenResult(entry.sequence_id, entry.position, TokenKind.NOTHING, entry.status, entry.kv_len)
        if entry.sequence_id in _PROBE_IDS:
            difference = self._probe.add(entry.position, logits)
            return TokenResult(entry.sequence_id, entry.position, TokenKind.PROBE, value=difference)
        sequence = self._sequences.get(entry.sequence_id)
        if sequence is None:  # cancelled while its step was on its way back to the head
            return TokenResult(entry.sequence_id, entry.position, TokenKind.NOTHING)
        if not bool(logits[-1].isfinite().all()):
            return TokenResult(entry.sequence_id, entry.position, TokenKind.NOTHING, EntryStatus.NOT_FINITE)
        sample = sequence.sampler.next_token(logits[-1])
        kind = TokenKind.TOKEN if sample.logprob is None else TokenKind.TOKEN_WITH_LOGPROB
        return TokenResult(
            entry.sequence_id,
            entry.position,
            kind,
            token_id=sample.token_id,
            value=sample.logprob or 0.0,
            alternatives=sample.alternatives,
        )

    def _drop_oldest_kept(self) -> None:
        """Memory is planned for `max_sequences`; open ones come first."""
        open_now = sum(1 for sequence_id in self._sequences if sequence_id not in _PROBE_IDS)
        while self._kept and open_now + len(self._kept) > self._max_sequences:
            del self._kept[next(iter(self._kept))]

    def _count_kv(self) -> None:
        caches = [*(sequence.cache for sequence in self._sequences.values()), *self._kept.values()]
        self.kv_bytes = sum(cache.size_bytes for cache in caches)


def _from_bytes(step: Step) -> torch.Tensor:
    """[rows, hidden] FP32; a copy, because frames are immutable."""
    if not step.hidden:
        return torch.empty(0, step.hidden_size)
    tensor = torch.frombuffer(bytearray(step.hidden), dtype=_WIRE_TO_TORCH[step.dtype])
    return tensor.view(-1, step.hidden_size).float()


def _to_bytes(hidden: torch.Tensor) -> bytes:
    """[rows, hidden] FP32 as raw little-endian bytes (x86-64 and aarch64 are little-endian)."""
    hidden = hidden.contiguous()
    return ctypes.string_at(hidden.data_ptr(), hidden.nbytes)  # numpy is no dependency of a stage
