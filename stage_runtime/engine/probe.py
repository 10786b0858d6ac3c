"""The ring's probe: 64 fixed tokens, once whole and once token by token; how far do the logits differ?"""

from __future__ import annotations

import math

import torch

PROBE_TOKENS = 64
# Policy `exact` promises equal tokens up to near-ties within twice this; beyond it the promise would be empty.
EXACT_LARGEST_LOGIT_DIFFERENCE = 1e-3


def probe_token_ids(vocab_size: int) -> list[int]:
    """64 tokens spread over the vocabulary (multiplicative hashing by Knuth's 2654435761), the same on every box."""
    return [(index + 1) * 2654435761 % 2**32 % vocab_size for index in range(PROBE_TOKENS)]


class Probe:
    """Compares on the head's holder. Both passes travel like any sequence; the whole one comes first."""

    def __init__(self) -> None:
        self._whole: torch.Tensor | None = None
        self._largest = 0.0

    def add(self, position: int, logits: torch.Tensor) -> float:
        """Take the logits of a pass.

        Args:
            position: of the first row. logits: [64, vocab] of the whole pass, or [1, vocab] of a step.

        Returns:
            The largest difference so far; infinite once a logit is not finite.
        """
        if logits.shape[0] == PROBE_TOKENS:
            self._whole = logits.clone()
            self._largest = 0.0 if bool(logits.isfinite().all()) else math.inf
            return self._largest
        if self._whole is None:
            return math.inf
        difference = float((self._whole[position] - logits[0]).abs().max())
        self._largest = max(self._largest, difference if math.isfinite(difference) else math.inf)
        if position == PROBE_TOKENS - 1:
            self._whole = None  # done: 64 rows of logits are megabytes
        return self._largest
