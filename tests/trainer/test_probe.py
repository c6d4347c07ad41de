"""What the trainer publishes beside its weights, for whoever loads them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


def micro_batch(*sequences: tuple[list[int], list[bool]]) -> Any:
    return SimpleNamespace(
        token_ids=np.array([i for ids, _ in sequences for i in ids], np.int32),
        trainable=np.array([t for _, trains in sequences for t in trains]),
        lengths=np.array([len(ids) for ids, _ in sequences], np.int32),
    )


def test_prompts_are_contexts_in_which_a_token_was_sampled_each_once() -> None:
    from paceline.trainer.probe import probe_prompts

    packed = micro_batch(
        ([1, 2, 3, 4], [False, False, True, True]),
        ([1, 2, 3, 9], [False, False, False, True]),
        ([5, 6], [False, False]),
        ([7, 8, 0, 0], [False, True, False, False]),
    )
    assert probe_prompts([packed, packed]) == [[1, 2, 3], [7]]


def test_prompts_are_few_and_short() -> None:
    from paceline.trainer.probe import probe_prompts

    long = [([n, *range(1000)], [False] + [True] * 1000) for n in range(20)]
    prompts = probe_prompts([micro_batch(*long)])
    assert len(prompts) == 8
    assert {len(prompt) for prompt in prompts} == {127}


def test_the_file_holds_the_logprobs_of_a_forward_pass(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from paceline.trainer.probe import write_probe
    from paceline.transport.probes import read_probes

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes)).eval()
    prompts = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]
    write_probe(model, prompts, tmp_path)
    probes = read_probes(tmp_path)
    assert [probe.token_ids for probe in probes] == prompts
    for probe in probes:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([probe.token_ids])).logits[0, -1]
        best = logits.log_softmax(-1).topk(4)
        assert [token for token, _ in probe.next] == best.indices.tolist()
        assert [value for _, value in probe.next] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_batch_without_a_context_writes_no_file(tmp_path: Path) -> None:
    from paceline.trainer.probe import write_probe

    write_probe(None, [], tmp_path)
    assert not list(tmp_path.iterdir())
