"""Tokens per second of three stages on loopback with TLS, of one stage alone, and of `transformers` in FP32.

    python -m benchmarks.decode [MODEL_DIRECTORY] [--rounds N] [--tokens N] [--fresh] [--quick]

Every process computes with one thread. On a machine whose cores the stages share, a ring can't beat one process: the
ring's figures show what the ring costs, not how it scales. Without a directory, SmolLM2-135M-Instruct of the tests.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import torch
import transformers

from benchmarks.contenders import Contender, StagePipeline, Timeline, TransformersPeer, running
from benchmarks.measure import Rounds, Spread, Values, machine_lines, table
from fleet.bundle.model_info import ModelInfo, read_model_json
from tests.models import smollm2_directory

ROUNDS = 5
TOKENS = 48
QUICK_TOKENS = 6
PROMPT_TOKENS = 66
BUDGET_SECONDS = 420.0
"""No round begins that would probably end later; run again to add to the rounds."""
IN_FLIGHT = 6
MIB = 1 << 20
CONTENDERS = {"ring": "3 stages", "one": "1 stage", "peer": "transformers FP32"}
STAGES = {"ring": 3, "one": 1}


@dataclass(frozen=True)
class Row:
    """A line of the result; `name` is the key of its values, behind the contender's."""

    name: str
    text: str


ROWS = (
    Row("decode", "decode, 1 request, tokens/s"),
    Row("decode_in_flight", f"decode, {IN_FLIGHT} requests in flight, tokens/s"),
    Row("prefill", f"prefill of {PROMPT_TOKENS} tokens, tokens/s"),
    Row("first_token", "first token of 1 request, ms (less is better)"),
    Row("overhead", "beside compute, ms a token (less is better)"),
    Row("compute", "compute of all stages, ms a token (less is better)"),
    Row("ready", "start to ready, s (less is better)"),
    Row("memory_1", "memory (PSS), first stage, MiB"),
    Row("memory_2", "memory (PSS), second stage, MiB"),
    Row("memory_3", "memory (PSS), third stage, MiB"),
)


def prompt(number: int, length: int, vocabulary: int) -> list[int]:
    """Token ids that differ from prompt to prompt; what they mean does not change how long they take."""
    return [(7919 * (position + 1) + 104729 * number) % vocabulary for position in range(length)]


def decode_rate(timeline: Timeline) -> float:
    """Tokens per second while every request was generating: from the last first token to the first last one."""
    begin = max(times[0] for times in timeline.arrivals)
    end = min(times[-1] for times in timeline.arrivals)
    count = sum(begin < time <= end for times in timeline.arrivals for time in times)
    return count / (end - begin)


async def measure(contender: Contender, count: int, vocabulary: int) -> Values:
    """What every contender is asked."""
    one = await contender.generate([prompt(0, PROMPT_TOKENS, vocabulary)], count)
    first = one.arrivals[0][0] - one.start
    prompts = [prompt(number, PROMPT_TOKENS, vocabulary) for number in range(1, IN_FLIGHT + 1)]
    many = await contender.generate(prompts, count)
    return {
        "decode": decode_rate(one),
        "decode_in_flight": decode_rate(many),
        "prefill": PROMPT_TOKENS / first,
        "first_token": first * 1e3,
    }


async def measure_stages(info: ModelInfo, stages: int, count: int) -> Values:
    """The same of a pipeline, and what only it has."""
    async with running(info, stages) as pipeline:
        values = await measure(pipeline, count, info.config.vocab_size)
        values |= await measure_overhead(pipeline, count, info.config.vocab_size)
        values |= {
            f"memory_{number}": size / MIB for number, size in enumerate(pipeline.memory_bytes().values(), start=1)
        }
        return values | {"ready": pipeline.ready_seconds}


async def measure_overhead(pipeline: StagePipeline, count: int, vocabulary: int) -> Values:
    """Time of a step that no compute thread worked; of a prompt of one token, so that every step has one row."""
    before = await pipeline.compute_seconds()
    timeline = await pipeline.generate([prompt(0, 1, vocabulary)], count)
    computed = await pipeline.compute_seconds() - before
    elapsed = timeline.arrivals[0][-1] - timeline.start
    return {"overhead": (elapsed - computed) / count * 1e3, "compute": computed / count * 1e3}


async def run_rounds(info: ModelInfo, rounds: Rounds, wanted: int, count: int) -> None:
    """Measure what is missing, as far as it can be done in time."""
    begin = time.monotonic()
    if len(rounds.finished) >= wanted:
        return
    peer = TransformersPeer(info)
    try:
        await peer.generate([prompt(0, PROMPT_TOKENS, info.config.vocab_size)], 2)  # the stages have warmed up too
        longest = 0.0
        while len(rounds.finished) < wanted and time.monotonic() - begin + longest < BUDGET_SECONDS:
            round_begin = time.monotonic()
            print(f"round {len(rounds.finished) + 1} of {wanted} …", file=sys.stderr, flush=True)
            load = os.getloadavg()[0]
            values: Values = {}
            for name, stages in STAGES.items():
                own = await measure_stages(info, stages, count)
                values |= {f"{name}.{key}": value for key, value in own.items()}
            own = await measure(peer, count, info.config.vocab_size)
            values |= {f"peer.{key}": value for key, value in own.items()}
            rounds.add(values, load)
            longest = max(longest, time.monotonic() - round_begin)
    finally:
        peer.close()


def report(rounds: Rounds) -> str:
    """The rounds as a table; a value that a contender does not have stays empty."""

    def cell(spread: Spread | None) -> str:
        return "" if spread is None else str(spread)

    rows = []
    for row in ROWS:
        own = [cell(rounds.spread(f"{name}.{row.name}")) for name in CONTENDERS]
        ratios = [cell(rounds.ratio(f"{name}.{row.name}", f"peer.{row.name}")) for name in STAGES]
        rows.append([row.text, *own, *ratios])
    header = ["", *CONTENDERS.values(), *(f"{CONTENDERS[name]} ÷ transformers" for name in STAGES)]
    note = f"n = {len(rounds.finished)} rounds; median [quartiles]; ratios are taken within a round"
    return f"{table(header, rows)}\n{note}\nrounds: {rounds.path}"


def main(argv: list[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_directory", type=Path, nargs="?", help="a model of a bundle: model.json and shards")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"default {ROUNDS}")
    parser.add_argument("--tokens", type=int, default=TOKENS, help=f"generated a request, default {TOKENS}, at least 2")
    parser.add_argument("--fresh", action="store_true", help="measure again what an earlier run has finished")
    parser.add_argument("--quick", action="store_true", help="one short round: whether it runs, not how fast")
    arguments = parser.parse_args(argv)
    count, wanted = (QUICK_TOKENS, 1) if arguments.quick else (arguments.tokens, arguments.rounds)
    if count < 2 or wanted < 1:
        parser.error("a rate needs at least two tokens and one round")
    info = read_model_json(arguments.model_directory or smollm2_directory())
    print(f"{info.name}, digest {info.digest[:16]}; torch {torch.__version__}, transformers {transformers.__version__}")
    print("\n".join(machine_lines()), flush=True)
    rounds = Rounds("decode", {"model": info.digest, "tokens": count}, fresh=arguments.fresh)
    asyncio.run(run_rounds(info, rounds, wanted, count))
    print(report(rounds))


if __name__ == "__main__":
    main()
