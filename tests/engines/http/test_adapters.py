"""LoRA adapters as versions: no pause, a name for each, and tokens stamped with the adapter that sampled them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from fake_server import GENERATE, FakeServer, Say
from test_http_generate import engine_on

from paceline.errors import EngineError
from paceline.ports import GenerateRequest, Samples, SamplingParams


def adapter(root: Path, version: int) -> str:
    path = root / f"v{version}"
    path.mkdir()
    (path / "adapter_config.json").write_text("{}")
    (path / "adapter_model.safetensors").touch()
    return str(path)


def request(name: str) -> GenerateRequest:
    return GenerateRequest(name, np.arange(4, dtype=np.int32), SamplingParams(max_tokens=6))


async def test_calls_name_the_adapter_and_those_under_way_keep_theirs_without_a_pause(tmp_path: Path) -> None:
    first, second = adapter(tmp_path, 1), adapter(tmp_path, 2)
    async with FakeServer() as fake, engine_on(fake) as engine:
        base = await engine.generate(request("base"))
        await engine.update_weights(1, first)
        fake.hold = asyncio.Event()
        running = asyncio.ensure_future(engine.generate(request("a")))
        while not fake.running:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await engine.update_weights(2, second)
        fake.hold.set()
        after = await engine.generate(request("b"))
        assert [r.versions for r in (base, await running, after)] == [((0, 6),), ((1, 6),), ((2, 6),)]
        assert [c.body["model"] for c in fake.calls if c.path == GENERATE] == [
            "policy",
            "policy-v1",
            "policy-v2",
        ]
        assert fake.adapters == {"policy-v1": first, "policy-v2": second}
        assert not fake.paths("/pause", "/resume", "/update_weights")
        assert engine.version == 2


async def test_a_server_without_adapters_is_refused_with_the_remedy(tmp_path: Path) -> None:
    async with FakeServer(missing=("/v1/load_lora_adapter",)) as fake, engine_on(fake) as engine:
        with pytest.raises(EngineError, match=r"LoRA adapter .*v1: start the server with --enable-lora"):
            await engine.update_weights(1, adapter(tmp_path, 1))
        assert engine.version == 0


async def test_an_adapter_that_the_server_refuses_or_that_is_not_what_it_serves_is_not_called(
    tmp_path: Path,
) -> None:
    class Doubts:
        async def before(self, path: str) -> None: ...

        async def after(self, engine: Samples, version: int, path: str) -> None:
            reply = await engine.generate(request("probe"))
            assert reply.versions == ((version, 6),), "the probe goes to the new one"
            raise EngineError("it computes something else")

    async with FakeServer() as fake, engine_on(fake, check=Doubts()) as engine:
        fake.say("/v1/load_lora_adapter", Say(status=400, body={"error": {"message": "rank 64 > 16"}}))
        with pytest.raises(EngineError, match="rank 64 > 16"):
            await engine.update_weights(1, adapter(tmp_path, 1))
        with pytest.raises(EngineError, match="something else"):
            await engine.update_weights(2, adapter(tmp_path, 2))
        assert (await engine.generate(request("next"))).versions == ((0, 6),)
        assert [c.body["model"] for c in fake.calls if c.path == GENERATE] == ["policy-v2", "policy"]
