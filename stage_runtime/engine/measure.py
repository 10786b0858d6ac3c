"""What one decode step of a layer and of the head takes on this box; the planner's measure of a box."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from stage_runtime.checkpoint.manifest import LlamaConfig
from stage_runtime.model.kv_cache import KvCache
from stage_runtime.model.llama import Decoder, Head, Layer, Span

# One untimed step pages code and weights in; 5 timed ones keep a 135M model's layers and head within 50 ms in all.
TIMED_STEPS = 5


@torch.inference_mode()
def measure_layer_seconds(config: LlamaConfig, layer: Layer, *others: Layer) -> float:
    """Seconds of one decode step, one row, through one layer: median, in the calling thread.

    Args:
        others: further layers of the stage. A step goes through all, and their mean counts: a single layer may stay in
            the processor's cache between two steps, as it never does in serving.
    """
    layers = [layer, *others]
    decoder = Decoder(config, layers)
    cache = KvCache(config, len(layers), TIMED_STEPS + 1)
    hidden = torch.ones(1, config.hidden_size)
    return _median_seconds(lambda: decoder(hidden, [Span(cache, 1)])) / len(layers)


@torch.inference_mode()
def measure_head_seconds(config: LlamaConfig, head: Head) -> float:
    """Seconds of norm and LM head of one row: median, in the calling thread."""
    hidden = torch.ones(1, config.hidden_size)
    return _median_seconds(lambda: head.logits(hidden))


def _median_seconds(step: Callable[[], object]) -> float:
    step()
    times = []
    for _ in range(TIMED_STEPS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    return median(times)
