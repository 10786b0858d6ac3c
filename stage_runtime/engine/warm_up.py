"""Choosing the linear kernel by trying it: on the own weights, with the row counts that serving will bring."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from fleet.errors import FleetError
from fleet.planning.weights import KernelName
from stage_runtime.checkpoint.manifest import LlamaConfig, ModelManifest
from stage_runtime.model.kv_cache import KvCache
from stage_runtime.model.linear import make_linear, packed_available
from stage_runtime.model.llama import Decoder, Layer, Span
from stage_runtime.model.load import load_layer, stored_dtype

log = logging.getLogger(__name__)

WARM_UP_ROWS = 64
ROW_COUNTS = (1, 2, 8, 64)
# FP16 weights lose nothing when the file holds FP16, and FP32 sums differ by about 1e-6; 1e-4 means a broken kernel.
LARGEST_RELATIVE_DIFFERENCE = 1e-4


@dataclass(frozen=True)
class KernelChoice:
    """The kernel and how well it agrees: largest relative difference of a layer's output over row counts, between
    prefill and decode, and from dense FP32."""

    kernel: KernelName
    largest_relative_difference: float


def relative_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest over rows of max|a − b| / max|a|; a, b: [rows, H]."""
    return float(((a - b).abs().amax(-1) / a.abs().amax(-1).clamp_min(1e-30)).max())


def synthetic_layer(config: LlamaConfig, kernel: KernelName) -> Layer:
    """A layer of the model's shape with random FP16 weights, for a spare that holds none: its kernels are tried and
    their code is paged in all the same, so taking over layers later finds it warm."""
    generator = torch.Generator().manual_seed(0)
    queries, groups = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim

    def weight(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator).div(columns**0.5).half()

    hidden, wide = config.hidden_size, config.intermediate_size
    shapes = {
        "q": (queries, hidden),
        "k": (groups, hidden),
        "v": (groups, hidden),
        "o": (hidden, queries),
        "gate": (wide, hidden),
        "up": (wide, hidden),
        "down": (hidden, wide),
    }
    linears = {name: make_linear(kernel, weight(*shape)) for name, shape in shapes.items()}
    return Layer(input_norm=torch.ones(hidden), post_norm=torch.ones(hidden), **linears)


def run_in_chunks(decoder: Decoder, hidden: torch.Tensor, rows_per_step: int) -> torch.Tensor:
    """One sequence's rows [64, H] through the layers, `rows_per_step` at a time: 64 is a prefill, 1 is decoding."""
    cache = KvCache(decoder.config, len(decoder.layers), WARM_UP_ROWS)
    chunks = torch.split(hidden, rows_per_step)
    return torch.cat([decoder(chunk, [Span(cache, chunk.shape[0])]) for chunk in chunks])


def run_as_batch(decoder: Decoder, hidden: torch.Tensor) -> torch.Tensor:
    """Every row [R, H] as the first token of a sequence of its own, all in one micro-batch."""
    spans = [Span(KvCache(decoder.config, len(decoder.layers), 1), 1) for _ in range(hidden.shape[0])]
    return decoder(hidden, spans)


@torch.inference_mode()
def compare(config: LlamaConfig, layer: Layer, reference: Layer) -> float:
    """Largest relative difference of a layer over row counts, prefill against decode, and from a reference kernel."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(WARM_UP_ROWS, config.hidden_size, generator=generator)
    decoder = Decoder(config, [layer])
    expected = run_in_chunks(Decoder(config, [reference]), hidden, WARM_UP_ROWS)
    differences = [relative_difference(expected, run_in_chunks(decoder, hidden, rows)) for rows in ROW_COUNTS]
    alone = torch.cat([run_as_batch(decoder, row) for row in torch.split(hidden, 1)])
    for rows in ROW_COUNTS[1:]:
        differences.append(relative_difference(alone[:rows], run_as_batch(decoder, hidden[:rows])))
    return max(differences)


def choose_kernel(wanted: str, directory: Path, manifest: ModelManifest, layer: int | None) -> KernelChoice:
    """Try kernels on one of the stage's own layers and take the fastest that agrees.

    Args:
        wanted: "auto" (packed where it runs, the file holds FP16 and it agrees; else dense), "dense" or "packed".
        layer: an own layer; None for a spare.

    Raises:
        FleetError: the shard is damaged, or "packed" was asked for and can't be had.
    """

    def build(kernel: KernelName) -> Layer:
        if layer is None:
            return synthetic_layer(manifest.config, kernel)
        return load_layer(directory, manifest, layer, kernel)

    obstacle = "" if packed_available() else "this CPU or this build of torch has no FP16-packed linear"
    if layer is not None and (dtype := stored_dtype(directory, manifest, layer)) != torch.float16:
        obstacle = obstacle or f"the shards hold {dtype}, which FP16 can't hold exactly"
    if wanted == "packed" and obstacle:
        raise FleetError(f"kernel 'packed': {obstacle}", hint="set the kernel to auto or dense")
    reference = build("dense")
    if wanted != "dense" and not obstacle:
        difference = compare(manifest.config, build("packed"), reference)
        if difference <= LARGEST_RELATIVE_DIFFERENCE:
            return KernelChoice("packed", difference)
        problem = f"relative difference {difference:.1e}, at most {LARGEST_RELATIVE_DIFFERENCE:.0e}"
        if wanted == "packed":
            raise FleetError(f"kernel 'packed': {problem}", hint="set the kernel to auto or dense")
        log.warning("kernel packed is not taken: %s", problem)
    return KernelChoice("dense", compare(manifest.config, reference, reference))
