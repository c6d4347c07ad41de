"""A whole run on a real vLLM, watched from between the two: what was sent and received is what was trained."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from vllm_kit import ROOT, Reference, Server, assert_same, run_to_end
from vllm_wiretap import Call, Wiretap, number, sequences

from paceline.transport.layout import ACKS, BATCHES, PROBE_FILE, rank_file, steps_in, weights_dir

EXAMPLE = ROOT / "examples" / "reverse-text" / "vllm.toml"
STEPS = 15


@pytest.mark.timeout(600)
async def test_the_demo_trains_on_vllm_and_every_token_trained_is_one_that_was_sampled(
    server: Server, tmp_path: Path
) -> None:
    async with Wiretap(server).running() as tap:
        words = [f"--engine.urls=[{json.dumps(tap.url)}]", f"--run.dir={tmp_path}", "--run.name=t"]
        words += [f"--run.max_steps={STEPS}", "--plain", "--summary=json"]
        out = await run_to_end(EXAMPLE, *words)

    run_dir = tmp_path / "t"
    received: defaultdict[tuple[int, ...], list[Call]] = defaultdict(list)
    for call in tap.calls:
        received[(*call[0], *call[1])].append(call)
    steps = steps_in(run_dir / BATCHES)
    assert steps[-1] == STEPS
    trained = 0
    for step in steps:
        assert rank_file(run_dir, step, 0).is_file()
        for ids, trainable, logprobs in sequences(run_dir, step):
            # One turn: a sequence is a call, and no call is trained twice.
            alike = received[tuple(ids.tolist())]
            call = next(c for c in alike if np.array_equal(logprobs[trainable], np.array(c[2], np.float32)))
            alike.remove(call)
            sent, _, _, spans = call
            assert trainable.tolist() == [False] * len(sent) + [True] * (len(ids) - len(sent))
            assert {number(span["version"]) for span in spans} <= set(range(step))
            trained += int(trainable.sum())
    assert trained > 10_000

    folder = run_dir / ACKS
    metrics = [json.loads((folder / f"step_{n:06d}.json").read_text())["metrics"] for n in steps_in(folder)]
    assert len(metrics) == STEPS
    assert metrics[0]["mismatch_kl"] < 0.001  # both at v0: bfloat16 there, float32 here
    assert tap.loads >= STEPS
    assert tap.probes >= 8 * STEPS
    assert (weights_dir(run_dir, STEPS) / PROBE_FILE).is_file()
    # What vLLM said under the last version of weights it loaded is what those weights say.
    last = max(number(spans[0]["version"]) for *_, spans in tap.calls if spans)
    reference = Reference(weights_dir(run_dir, last))
    label = f"v{last}"
    calls = [c for c in tap.calls if {span["version"] for span in c[3]} == {label} and c[1]][:64]
    expected = [reference.logprobs(sent, got) for sent, got, *_ in calls]
    assert_same(
        np.concatenate([np.array(logprobs, np.float32) for _, _, logprobs, _ in calls]),
        np.concatenate(expected),
    )
    report = json.loads(out.splitlines()[-1])
    assert report["tokens_conserved"]
    assert report["heldout_end"] > report["heldout_start"] + 0.2  # 0.38 to 0.92 where this was written
