"""A few prompts and what the new weights make of them, published beside the weights.

Whoever loads the weights can compare: a server may report a load that did not take place, or only in part. The format
is described in docs/wire.md; `paceline.runtime.weight_check` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from paceline.trainer.batch import MicroBatch
from paceline.transport.layout import PROBE_FILE

_PROMPTS, _LONGEST, _NEXT = 8, 128, 4


def probe_prompts(micro_batches: Sequence[MicroBatch]) -> list[list[int]]:
    """Up to 8 different contexts of the batch, of at most 128 tokens, each ending where a token was sampled."""
    found: dict[bytes, list[int]] = {}
    for micro_batch in micro_batches:
        start = 0
        for length in micro_batch.lengths.tolist():
            sampled = np.flatnonzero(micro_batch.trainable[start : start + min(length, _LONGEST)])
            if len(sampled):
                ids = micro_batch.token_ids[start : start + int(sampled[-1])]
                found.setdefault(ids.tobytes(), ids.tolist())
            if len(found) == _PROMPTS:
                return list(found.values())
            start += length
    return list(found.values())


@torch.no_grad()
def write_probe(model: Any, prompts: Sequence[Sequence[int]], out: Path) -> None:
    """Write `probe.json` into a weight directory: the most likely next tokens of each prompt, in float32."""
    if not prompts:
        return
    width = max(map(len, prompts))
    rows = torch.zeros((len(prompts), width), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        # Padded on the right, which a causal model computes rightly without a mask.
        rows[row, : len(prompt)] = torch.tensor(prompt)
    last = torch.tensor([len(prompt) - 1 for prompt in prompts])
    logits = model(input_ids=rows, use_cache=False).logits[torch.arange(len(prompts)), last]
    best = logits.float().log_softmax(-1).topk(min(_NEXT, logits.shape[-1]))
    probes = [
        {"token_ids": list(prompt), "next": [list(pair) for pair in zip(ids, values, strict=True)]}
        for prompt, ids, values in zip(prompts, best.indices.tolist(), best.values.tolist(), strict=True)
    ]
    (out / PROBE_FILE).write_text(json.dumps({"probes": probes}) + "\n", encoding="utf-8")
