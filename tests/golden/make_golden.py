"""Reference tokens by `transformers` in FP32 from the bytes of a bundle's shards; nothing of this project is imported.

Make the golden file:   python tests/golden/make_golden.py MODEL_DIRECTORY
Recompute a few of it:  python tests/golden/make_golden.py MODEL_DIRECTORY --check 3 --commit HASH [--seed S]
Recompute by name:      python tests/golden/make_golden.py MODEL_DIRECTORY --names sky seeded-choice

`--check N` recomputes N prompts chosen by the commit's hash and one at random, whose seed is printed. Tokens must be
equal, unless the first different one is a near-tie, which is printed with its margin.

Prompts and seeds of prompts.json were chosen so that few tokens are near-ties: a mismatch is then almost surely a bug.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import struct
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent
GOLDEN_FILE = HERE / "smollm2-135m.json"
PROMPTS_FILE = HERE / "prompts.json"
SCHEMA = 1
MAX_TOKENS = 64
NEAR_TIE_LOGITS = 2e-3
"""2δ with δ = 1e-3, the largest logit difference that policy `exact` admits."""
NEAR_TIE_PROBABILITY = 1e-3
"""A logit change of δ moves probabilities, and so the bounds of a cumulative distribution, by at most about δ."""


def load_model(directory: Path, description: dict[str, Any]) -> LlamaForCausalLM:
    """LlamaForCausalLM in FP32 from the shards that model.json names, each checked against its digest."""
    config = dict(description["config"])
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling")
    config["rope_parameters"] = {"rope_theta": theta, "rope_type": "default", **(scaling or {})}
    model = LlamaForCausalLM(LlamaConfig(**config, attn_implementation="eager")).float().eval()
    weights: dict[str, torch.Tensor] = {}
    for file in description["files"]:
        path = directory / file["name"]
        if hashlib.sha256(path.read_bytes()).hexdigest() != file["sha256"]:
            sys.exit(f"{path} does not have the digest that model.json says")
        if path.suffix == ".safetensors":
            weights |= {name: tensor.float() for name, tensor in load_file(path).items()}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    allowed = {"lm_head.weight"} if config["tie_word_embeddings"] else set()
    if unexpected or not set(missing) <= allowed:
        sys.exit(f"{directory}: missing tensors {missing}, unexpected tensors {unexpected}")
    model.tie_weights()
    return model


def load_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """The bundle's tokenizer with the model's own chat template."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    tokenizer.chat_template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
    return tokenizer


def prompt_text(entry: dict[str, Any]) -> str:
    """The `repeat`ed lines of a long prompt with their numbers filled in, or nothing."""
    repeat = entry.get("repeat")
    if repeat is None:
        return ""
    return "".join(repeat["text"].format(day, day % 5 + 1, 40 + day * 7 % 30) for day in range(1, repeat["times"] + 1))


def prompt_ids(entry: dict[str, Any], system: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Token ids of a prompt: plain text, or turns (user first) in the model's chat template."""
    if "text" in entry:
        return [int(token) for token in tokenizer(entry["text"])["input_ids"]]
    turns = list(entry["chat"])
    turns[-1] = prompt_text(entry) + turns[-1]
    messages = [{"role": "system", "content": system}]
    messages += [{"role": ("user", "assistant")[index % 2], "content": turn} for index, turn in enumerate(turns)]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]


def uniform(seed: int, choice: int, position: int) -> float:
    """u in [0, 1): the top 53 bits of BLAKE2b-64 over little-endian (seed u64, choice u32, position u32)."""
    digest = hashlib.blake2b(struct.pack("<QII", seed, choice, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def greedy(logits: np.ndarray) -> tuple[int, dict[str, float]]:
    """The best token, the lower id at a tie, and how far its logit is above the second best."""
    token = int(np.argmax(logits))
    second = float(np.max(np.delete(logits, token)))
    return token, {"gap": float(logits[token]) - second}


def draw(logits: np.ndarray, answer: list[int], sampling: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """Penalties → temperature → top_k → top_p → inverse CDF in token-id order, all in float64.

    Returns the token and its margins: `boundary`, the distance of u to the nearer end of the token's interval;
    `top_k` and `top_p`, how far (logits, probability) the filtered set is from another one.
    """
    values = logits.astype(np.float64)
    for token, count in Counter(answer).items():
        values[token] -= sampling.get("frequency_penalty", 0.0) * count + sampling.get("presence_penalty", 0.0)
    values /= sampling["temperature"]
    order = np.lexsort((np.arange(len(values)), -values))  # descending, the lower id first at a tie
    margins: dict[str, float] = {}
    top_k = sampling.get("top_k", 0)
    if top_k:
        margins["top_k"] = float(values[order[top_k - 1]] - values[order[top_k]])
        order = order[:top_k]
    probabilities = np.exp(values[order] - values[order[0]])
    probabilities /= probabilities.sum()
    top_p = sampling.get("top_p", 1.0)
    if top_p < 1.0:
        cumulative = np.cumsum(probabilities)
        kept = min(int(np.searchsorted(cumulative, top_p, side="left")) + 1, len(order))
        margins["top_p"] = float(np.min(np.abs(cumulative - top_p)))
        order, probabilities = order[:kept], probabilities[:kept]
    by_id = np.argsort(order)
    ids, probabilities = order[by_id], probabilities[by_id] / probabilities.sum()
    cumulative = np.cumsum(probabilities)
    u = uniform(sampling["seed"], sampling.get("choice", 0), len(answer))
    index = min(int(np.searchsorted(cumulative, u, side="right")), len(ids) - 1)
    low = float(cumulative[index - 1]) if index else 0.0
    margins["boundary"] = min(u - low, float(cumulative[index]) - u)
    return int(ids[index]), margins


@torch.inference_mode()
def generate(
    model: LlamaForCausalLM, prompt: list[int], stop: set[int], sampling: dict[str, Any] | None
) -> dict[str, Any]:
    """At most MAX_TOKENS tokens, ending before a stop token. `margins` has one entry more if it ended by one."""
    answer: list[int] = []
    margins: list[dict[str, float]] = []
    cache = None
    step = torch.tensor([prompt])
    reason = "length"
    while len(answer) < MAX_TOKENS:
        output = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits = output.logits[0, -1].numpy()
        token, margin = greedy(logits) if sampling is None else draw(logits, answer, sampling)
        margins.append({name: round(value, 7) for name, value in margin.items()})
        if token in stop:
            reason = "stop"
            break
        answer.append(token)
        step = torch.tensor([[token]])
    return {"tokens": answer, "finish_reason": reason, "margins": margins}


def is_near_tie(margin: dict[str, float]) -> bool:
    """Whether a logit change that policy `exact` admits can turn this choice."""
    logits = min(margin.get("gap", 1.0), margin.get("top_k", 1.0))
    probability = min(margin.get("boundary", 1.0), margin.get("top_p", 1.0))
    return logits <= NEAR_TIE_LOGITS or probability <= NEAR_TIE_PROBABILITY


def compute(directory: Path, names: set[str] | None) -> dict[str, Any]:
    """The golden data of the prompts named (all if None)."""
    encoded = (directory / "model.json").read_bytes()
    description = json.loads(encoded)
    model, tokenizer = load_model(directory, description), load_tokenizer(directory)
    source = json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))
    stop = set(description["eos_token_ids"])
    prompts = []
    for entry in [*source["greedy"], *source["seeded"]]:
        if names is not None and entry["name"] not in names:
            continue
        started = time.monotonic()
        ids = prompt_ids(entry, source["system"], tokenizer)
        result = generate(model, ids, stop, entry.get("sampling"))
        prompts.append({"name": entry["name"], "sampling": entry.get("sampling"), "prompt": ids, **result})
        seconds = time.monotonic() - started
        print(f"{entry['name']}: {len(ids)} + {len(result['tokens'])} tokens, {seconds:.1f} s", file=sys.stderr)
        print(f"    {tokenizer.decode(result['tokens'])!r}", file=sys.stderr)
    return {
        "schema": SCHEMA,
        "model_digest": hashlib.sha256(encoded).hexdigest(),
        "max_tokens": MAX_TOKENS,
        "stop_token_ids": sorted(stop),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "tokenizers": tokenizers.__version__,
            "machine": platform.machine(),
        },
        "prompts": prompts,
    }


def chosen_names(count: int, commit: str, seed: int) -> set[str]:
    """`count` prompts by the commit's hash, and one at random by `seed`."""
    source = json.loads(PROMPTS_FILE.read_text(encoding="utf-8"))
    names = [entry["name"] for entry in [*source["greedy"], *source["seeded"]]]
    by_commit = sorted(names, key=lambda name: hashlib.sha256(f"{commit}:{name}".encode()).hexdigest())
    return {*by_commit[:count], random.Random(seed).choice(names)}  # noqa: S311 - a sample of tests, no secret


def check(directory: Path, names: set[str]) -> int:
    """Recompute the prompts named and compare; returns the number of mismatches that are no near-tie."""
    golden = json.loads(GOLDEN_FILE.read_text(encoding="utf-8"))
    computed = compute(directory, names)
    if computed["model_digest"] != golden["model_digest"]:
        print(f"model digest {computed['model_digest']}, the golden file is for {golden['model_digest']}")
        return 1
    expected = {prompt["name"]: prompt for prompt in golden["prompts"]}
    failures = near_ties = 0
    for prompt in computed["prompts"]:
        want = expected[prompt["name"]]
        if prompt["prompt"] != want["prompt"]:
            print(f"{prompt['name']}: the prompt's token ids differ from the golden file's")
            failures += 1
        elif (prompt["tokens"], prompt["finish_reason"]) != (want["tokens"], want["finish_reason"]):
            pairs = zip(prompt["tokens"], want["tokens"], strict=False)
            shorter = min(len(prompt["tokens"]), len(want["tokens"]))
            first = next((index for index, (new, old) in enumerate(pairs) if new != old), shorter)
            near = is_near_tie(want["margins"][first]) and is_near_tie(prompt["margins"][first])
            word = "near-tie" if near else "MISMATCH"
            margins = f"margins {want['margins'][first]} and {prompt['margins'][first]}"
            print(f"{prompt['name']}: {word} at token {first}: {margins}")
            near_ties, failures = near_ties + near, failures + (not near)
    print(f"golden check: {len(names)} prompts, {near_ties} near-ties, {failures} mismatches")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_directory", type=Path)
    parser.add_argument("--check", type=int, metavar="N", help="recompute N prompts chosen by the commit, and one more")
    parser.add_argument("--commit", default="", help="hash that chooses the prompts")
    parser.add_argument("--seed", type=int, help="chooses the one at random; drawn and printed if absent")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="recompute these prompts")
    arguments = parser.parse_args()
    if arguments.names:
        return 1 if check(arguments.model_directory, set(arguments.names)) else 0
    if arguments.check is not None:
        seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
        names = chosen_names(arguments.check, arguments.commit, seed)
        print(f"golden check: commit {arguments.commit}, seed {seed}, prompts {', '.join(sorted(names))}")
        return 1 if check(arguments.model_directory, names) else 0
    golden = compute(arguments.model_directory, None)
    prompts = golden.pop("prompts")
    lines = ",\n".join(json.dumps(prompt, separators=(",", ":")) for prompt in prompts)
    head = json.dumps(golden, indent=1).removesuffix("\n}")
    GOLDEN_FILE.write_text(f'{head},\n "prompts": [\n{lines}\n]}}\n', encoding="utf-8")
    near = sum(is_near_tie(margin) for prompt in prompts for margin in prompt["margins"])
    print(f"{GOLDEN_FILE.name}: {len(prompts)} prompts, {near} tokens at a near-tie")
    return 0


if __name__ == "__main__":
    sys.exit(main())
