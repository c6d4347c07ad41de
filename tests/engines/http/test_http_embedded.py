"""The client against the embedded engine, in a process of its own: the real thing on both ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from paceline.engines.http import HttpEngine, Limits, connect
from paceline.errors import EngineError
from paceline.ports import GenerateRequest, SamplingParams
from paceline.runtime.processes import ChildProcess

pytestmark = pytest.mark.torch
VOCAB = 128


def make_model(directory: Path, seed: int) -> str:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return [make_model(tmp_path_factory.mktemp(f"v{seed}"), seed) for seed in range(2)]


@pytest.fixture
async def engine(models: list[str], tmp_path: Path) -> AsyncIterator[HttpEngine]:
    command = [sys.executable, "-m", "paceline.engines.embedded", "--model", models[0], "--kv-tokens", "8192"]
    async with await ChildProcess.start(command, name="engine-0", log_path=tmp_path / "log") as server:
        limits = Limits(request_s=60.0, admin_s=20.0)
        engine = await connect(server.ready["url"], id="e0", served_name="policy", limits=limits)
        try:
            yield engine
        finally:
            await engine.close()


def request(name: str, tokens: int, **more: Any) -> GenerateRequest:
    sampling = SamplingParams(max_tokens=tokens, seed=11, **more)
    return GenerateRequest(request_id=name, token_ids=np.arange(2, 66, dtype=np.int32), sampling=sampling)


async def until_running(engine: HttpEngine) -> None:
    async with asyncio.timeout(20):
        while (await engine.load()).running == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_embedded_engine_keeps_the_whole_contract(engine: HttpEngine, models: list[str]) -> None:
    """One start of the engine (seconds) for all of it, in the order of a run's life."""
    facts = engine.facts
    assert (facts.route, facts.problems) == ("/inference/v1/generate", ())
    assert facts.processed_logprobs is True
    assert (engine.info.kv_tokens, engine.info.max_model_len) == (8192, 4096)
    assert engine.version == 0

    first = await engine.generate(request("a", 40))
    again = await engine.generate(request("b", 40))
    assert len(first.token_ids) == len(first.logprobs) > 0
    assert np.array_equal(first.token_ids, again.token_ids)
    assert again.cached_tokens > 0
    assert first.versions == ((0, len(first.token_ids)),)

    long = 3000
    running = asyncio.ensure_future(engine.generate(request("c", long)))
    await until_running(engine)
    await engine.abort("c")
    aborted = await running
    assert aborted.finish == "abort"
    assert 0 < len(aborted.token_ids) < long

    with pytest.raises(EngineError, match=r"engine e0.*update_weights.*/no/such/dir"):
        await engine.update_weights(1, "/no/such/dir")
    assert (await engine.generate(request("d", 40))).versions == first.versions

    running = asyncio.ensure_future(engine.generate(request("e", long, top_k=8)))
    await until_running(engine)
    await engine.update_weights(1, models[1])
    assert engine.version == 1
    spanning = await running
    assert [version for version, _ in spanning.versions] == [0, 1]
    assert sum(count for _, count in spanning.versions) == len(spanning.token_ids)
    fresh = await engine.generate(request("f", 40))
    assert {version for version, _ in fresh.versions} == {1}
    assert not np.array_equal(fresh.token_ids, first.token_ids)

    with pytest.raises(EngineError, match=r"answered 400.*4096"):
        await engine.generate(
            GenerateRequest(
                request_id="g", token_ids=np.full(5000, 5, np.int32), sampling=SamplingParams(max_tokens=4)
            )
        )
    load = await engine.load()
    assert (load.running, load.waiting) == (0, 0)
    assert load.generated_tokens > 100
    assert 0 < load.prefix_hits < load.prefix_queries


async def test_an_engine_that_interrupts_keeps_the_tokens_and_no_call_spans_two_versions(
    models: list[str], tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "paceline.engines.embedded", "--model", models[0], "--kv-tokens", "8192"]
    async with await ChildProcess.start(command, name="engine-0", log_path=tmp_path / "log") as server:
        engine = await connect(server.ready["url"], id="e0", served_name="policy", interrupt=True)
        try:
            running = [asyncio.ensure_future(engine.generate(request(f"a{n}", 3000))) for n in range(3)]
            await until_running(engine)
            update = asyncio.ensure_future(engine.update_weights(1, models[1]))
            while not update.done() and engine.in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0)
            late = await engine.generate(request("late", 40))
            await update
            for reply in await asyncio.gather(*running):
                assert reply.finish == "abort"
                assert reply.versions == ((0, len(reply.token_ids)),)
                assert 0 < len(reply.token_ids) < 3000
            if late.finish == "abort":
                assert not len(late.token_ids), "it was held off, and asks again"
            else:
                assert late.versions == ((1, 40),)
            after = await engine.generate(request("after", 40))
            assert after.versions == ((1, 40),)
        finally:
            await engine.close()


async def test_a_streamed_reply_is_the_one_that_comes_whole_and_is_told_as_it_is_sampled(
    engine: HttpEngine,
) -> None:
    told: list[int] = []
    parts = 0

    def tell(ids: Any) -> None:
        nonlocal parts
        parts += 1
        told.extend(ids)

    whole = await engine.generate(request("whole", 40))
    streamed = await engine.generate(msgspec.structs.replace(request("streamed", 40), tell=tell))
    assert np.array_equal(streamed.token_ids, whole.token_ids)
    assert np.array_equal(streamed.logprobs, whole.logprobs)
    assert (streamed.finish, streamed.versions) == (whole.finish, whole.versions)
    assert streamed.cached_tokens > 0
    assert told == whole.token_ids.tolist()
    assert parts > 2
    # An abort ends it with the tokens that it had.
    told.clear()
    running = asyncio.create_task(engine.generate(msgspec.structs.replace(request("long", 3000), tell=tell)))
    async with asyncio.timeout(30):
        while len(told) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await engine.abort("long")
    cut = await running
    assert cut.finish == "abort"
    assert cut.token_ids.tolist() == told
