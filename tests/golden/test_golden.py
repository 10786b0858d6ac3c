"""The golden file belongs to the bundle's model, and a few of its prompts come out the same again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from fleet.bundle.model_info import read_model_json
from tests.figures import note
from tests.models import smollm2_directory

HERE = Path(__file__).resolve().parent
GOLDEN = json.loads((HERE / "smollm2-135m.json").read_text(encoding="utf-8"))
RECOMPUTED_BY_COMMIT = 3


def test_the_golden_file_is_for_the_model_that_the_converter_makes() -> None:
    info = read_model_json(smollm2_directory())
    assert GOLDEN["model_digest"] == info.digest
    assert GOLDEN["stop_token_ids"] == sorted(info.eos_token_ids)


def test_the_golden_file_holds_twenty_greedy_and_five_seeded_prompts() -> None:
    greedy = [prompt for prompt in GOLDEN["prompts"] if prompt["sampling"] is None]
    assert (len(greedy), len(GOLDEN["prompts"]) - len(greedy)) == (20, 5)
    for prompt in GOLDEN["prompts"]:
        stopped = prompt["finish_reason"] == "stop"
        assert len(prompt["margins"]) == len(prompt["tokens"]) + stopped
        assert stopped or len(prompt["tokens"]) == GOLDEN["max_tokens"]
        assert not set(prompt["tokens"]) & set(GOLDEN["stop_token_ids"])


def test_plain_prompts_have_the_ids_of_the_bundles_tokenizer() -> None:
    tokenizer = Tokenizer.from_file(str(smollm2_directory() / "tokenizer.json"))
    source = json.loads((HERE / "prompts.json").read_text(encoding="utf-8"))
    ids = {prompt["name"]: prompt["prompt"] for prompt in GOLDEN["prompts"]}
    plain = [entry for entry in source["greedy"] if "text" in entry]
    assert plain
    for entry in plain:
        assert tokenizer.encode(entry["text"]).ids == ids[entry["name"]]


def test_the_script_imports_nothing_of_this_project() -> None:
    text = (HERE / "make_golden.py").read_text(encoding="utf-8")
    imports = [line for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert imports
    assert not [line for line in imports if "fleet" in line or "stage_runtime" in line or "tests" in line]


def recompute(*arguments: str) -> None:
    """Run the script's check; its lines are shown when the run ends."""
    done = subprocess.run(
        [sys.executable, str(HERE / "make_golden.py"), str(smollm2_directory()), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "TRANSFORMERS_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },  # decode is as fast, and no core waits for another
    )
    for line in done.stdout.splitlines():
        note(line)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "0 mismatches" in done.stdout


def test_prompts_chosen_by_the_commit_come_out_the_same() -> None:
    """Three by the commit's hash and one at random, whose seed the script prints."""
    git = ["git", "-C", str(HERE), "rev-parse", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "no-commit"
    recompute("--check", str(RECOMPUTED_BY_COMMIT), "--commit", commit)


@pytest.mark.soak
@pytest.mark.parametrize("name", [prompt["name"] for prompt in GOLDEN["prompts"]])
def test_every_prompt_comes_out_the_same(name: str) -> None:
    recompute("--names", name)
