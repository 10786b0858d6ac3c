"""The site's tokens are those of `transformers` in FP32 on the bundle's own bytes, up to counted near-ties."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from fleet.inventory.sitefile import SiteFile
from tests.figures import note
from tests.lab.lab import Lab
from tests.lab.processes import wait_until
from tests.site.commands import REPOSITORY, client_of, fleet
from tests.site.judge import MOST_NEAR_TIES, is_near_tie

pytestmark = pytest.mark.lab

GOLDEN = json.loads((REPOSITORY / "tests" / "golden" / "smollm2-135m.json").read_text(encoding="utf-8"))
REQUESTS_AT_ONCE = 6
PROBE_DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Outcome:
    """What became of a prompt: equal, or where it first differs and by how little that was decided."""

    name: str
    equal: bool
    position: int = -1
    margin: dict[str, float] | None = None


def generate(client: openai.OpenAI, prompt: dict[str, Any]) -> list[int]:
    """The token ids that the site answers to a prompt of the golden file."""
    sampling = prompt["sampling"] or {"temperature": 0.0}
    known = {name: sampling[name] for name in ("temperature", "top_p", "seed") if name in sampling}
    penalties = {name: sampling[name] for name in ("frequency_penalty", "presence_penalty") if name in sampling}
    extra = {"return_token_ids": True} | {name: sampling[name] for name in ("top_k",) if name in sampling}
    choice = int(sampling.get("choice", 0))
    answer = client.completions.create(
        model="smollm2-135m",
        prompt=prompt["prompt"],
        max_tokens=GOLDEN["max_tokens"],
        n=choice + 1,  # a choice's random stream depends on its index
        extra_body=extra,
        **known,
        **penalties,
    )
    return list(answer.choices[choice].token_ids)


def compare(prompt: dict[str, Any], tokens: list[int]) -> Outcome:
    """Where the answer leaves the golden tokens."""
    want = prompt["tokens"]
    if tokens == want:
        return Outcome(prompt["name"], equal=True)
    shorter = min(len(tokens), len(want))
    position = next((index for index in range(shorter) if tokens[index] != want[index]), shorter)
    return Outcome(prompt["name"], False, position, prompt["margins"][min(position, len(prompt["margins"]) - 1)])


def probed_difference(inventory: Path) -> float:
    """δ as `fleet status` shows it; the ring's probe runs behind the last switch."""
    found: list[float] = []

    def probed() -> bool:
        pipeline = fleet("status", "-i", inventory, "-o", "json", expect=None).data["pipelines"][0]
        found[:] = [value for value in (pipeline["largest_logit_difference"],) if value is not None]
        return bool(found)

    wait_until(probed, "the probe has run", PROBE_DEADLINE_SECONDS)
    return found[0]


def test_tokens_of_20_greedy_and_5_seeded_prompts_equal_the_golden_file(
    provisioned: Lab, lab_site: SiteFile, lab_inventory: Path
) -> None:
    difference = probed_difference(lab_inventory)
    assert 0 < difference <= 1e-3
    prompts = GOLDEN["prompts"]
    assert [prompt["sampling"] is None for prompt in prompts].count(True) == 20 and len(prompts) == 25
    with client_of(lab_site) as client, ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        answers = list(pool.map(lambda prompt: generate(client, prompt), prompts))
    outcomes = [compare(prompt, tokens) for prompt, tokens in zip(prompts, answers, strict=True)]
    different = [outcome for outcome in outcomes if not outcome.equal]
    note(f"{len(outcomes)} requests, δ {difference:.1e}, {len(different)} at a near-tie: {different}")
    for outcome in different:
        assert outcome.margin is not None and is_near_tie(outcome.margin, difference), outcome
    assert len(different) <= MOST_NEAR_TIES * len(outcomes)
