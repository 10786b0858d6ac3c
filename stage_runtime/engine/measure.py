"""What one decode step of a layer and of the head takes on this box; the planner's measure of a box."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from stage_runtime.checkpoint.manifest import LlamaConfig
from stage_runtime.model.kv_cache import KvCache
from stage_runtime.model.llama import Decoder, Head, Layer, Span

# One untimed step pages code and weights in; 7 timed ones take a 135M model's layers and head about 70 ms in all. The
# quickest counts, in time that the thread had a processor: a box starts many things at once, and a plan lives for
# months. (While three stages of a two-core machine started together, wall-clock figures were up to ten times too long.)
TIMED_STEPS = 7


@torch.inference_mode()
def measure_layer_seconds(config: LlamaConfig, layer: Layer, *others: Layer) -> float:
    """Seconds of one decode step, one row, through one layer: the quickest of a few, in the calling thread.

    Args:
        others: further layers of the stage. A step goes through all, and their mean counts: a single layer may stay in
            the processor's cache between two steps, as it never does in serving.
    """
    layers = [layer, *others]
    decoder = Decoder(config, layers)
    cache = KvCache(config, len(layers), TIMED_STEPS + 1)
    hidden = torch.ones(1, config.hidden_size)
    return _quickest_seconds(lambda: decoder(hidden, [Span(cache, 1)])) / len(layers)


@torch.inference_mode()
def measure_head_seconds(config: LlamaConfig, head: Head) -> float:
    """Seconds of norm and LM head of one row: the quickest of a few, in the calling thread."""
    hidden = torch.ones(1, config.hidden_size)
    return _quickest_seconds(lambda: head.logits(hidden))


def _quickest_seconds(step: Callable[[], object]) -> float:
    """With more than one compute thread, OpenMP's first one works or spins as long as the others work, so its time is
    that of the step."""
    step()
    times = []
    for _ in range(TIMED_STEPS):
        start = time.thread_time()
        step()
        times.append(time.thread_time() - start)
    return min(times)
