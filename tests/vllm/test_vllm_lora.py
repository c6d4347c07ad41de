"""LoRA adapters on a real vLLM: loaded while calls run, and computed exactly."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vllm_kit import (
    POLICY,
    PROMPT,
    URL,
    USUAL,
    VLLM,
    Reference,
    Server,
    assert_same,
    differs,
    engine_on,
    generating,
    request,
    serving,
    versions_of,
)

pytestmark = pytest.mark.skipif(
    bool(URL) and not VLLM, reason="starts a server of its own: run `make test-vllm`"
)
RANK, ALPHA = 8, 16


@pytest.fixture(scope="module")
def lora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("vllm-lora") / "server.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
        options = (
            "--max-model-len",
            "512",
            "--enable-lora",
            "--max-lora-rank",
            str(RANK),
            "--max-loras",
            "2",
        )
        with serving(log, *options) as server:
            yield server


def an_adapter(root: Path, version: int) -> tuple[Path, Reference]:
    """An adapter in peft's form, and the policy with it merged in, to compare with."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from safetensors.torch import save_file

    torch.manual_seed(version)
    model = transformers.AutoModelForCausalLM.from_pretrained(POLICY, dtype=torch.float32)
    tensors: dict[str, Any] = {}
    with torch.no_grad():
        for number, layer in enumerate(model.model.layers):
            for name in ("q_proj", "v_proj"):
                weight = getattr(layer.self_attn, name).weight
                a = (torch.randn(RANK, weight.shape[1]) * 0.1).to(torch.bfloat16)
                b = (torch.randn(weight.shape[0], RANK) * 0.1).to(torch.bfloat16)
                stem = f"base_model.model.model.layers.{number}.self_attn.{name}"
                tensors[f"{stem}.lora_A.weight"], tensors[f"{stem}.lora_B.weight"] = a, b
                weight += (ALPHA / RANK) * (b.float() @ a.float())
    path = root / f"v{version}"
    path.mkdir()
    save_file(tensors, path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": ["q_proj", "v_proj"]}
    config |= {"base_model_name_or_path": str(POLICY), "task_type": "CAUSAL_LM", "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps(config))
    merged = root / f"merged{version}"
    model.save_pretrained(merged)
    return path, Reference(merged)


@pytest.mark.usefixtures("endless")
async def test_an_adapter_is_loaded_under_running_calls_and_each_call_keeps_its_own(
    lora: Server, tmp_path: Path
) -> None:
    base = Reference(POLICY)
    (first, under_first), (second, under_second) = an_adapter(tmp_path, 1), an_adapter(tmp_path, 2)
    async with engine_on(lora) as engine:
        plain = await engine.generate(request(32, salt="v0"))
        assert_same(plain.logprobs, base.logprobs(PROMPT, plain.token_ids))
        await engine.update_weights(1, str(first))
        running = asyncio.ensure_future(engine.generate(request(400, salt="v1")))
        await generating(engine)
        await engine.update_weights(2, str(second))
        assert not running.done(), "nothing was paused or ended for it"
        after = await engine.generate(request(32, salt="v2"))
        reply = await running
    assert (versions_of(plain), versions_of(reply), versions_of(after)) == ([0], [1], [2])
    # The engine adds an adapter's part to each layer's output, rounded by itself; the reference has it in the weights.
    for said, adapted in ((reply, under_first), (after, under_second)):
        assert_same(said.logprobs, adapted.logprobs(PROMPT, said.token_ids), usual=2 * USUAL)
    assert differs(after.logprobs, base.logprobs(PROMPT, after.token_ids))
    assert len(np.unique(reply.token_ids)) > 1
