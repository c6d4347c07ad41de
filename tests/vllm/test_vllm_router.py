"""Behind a real vllm-router: sessions stay on one server, and what is for all servers reaches each of them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from vllm_kit import POLICY, PROMPT, VLLM, Reference, Server, assert_same, free_port, request, versions_of

from paceline.engines.http import Limits, connect_router
from paceline.ports import GenerateRequest, SamplingParams
from paceline.runtime.processes import ChildProcess

ROUTER = Path(VLLM or os.devnull).with_name("vllm-router")
pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(not ROUTER.exists(), reason="needs vllm-router: run `make test-vllm`"),
]
LIMITS = Limits(request_s=60.0, admin_s=30.0)


async def serve(log: Path) -> ChildProcess:
    """The servers need not be vLLM's own: it is the router that is tried."""
    command = [
        sys.executable,
        "-m",
        "paceline.engines.embedded",
        "--kv-tokens",
        "4096",
        "--model",
        str(POLICY),
    ]
    return await ChildProcess.start(command, name=log.stem, log_path=log, start_s=120.0)


@contextmanager
def router_over(urls: list[str], log: Path) -> Iterator[str]:
    """The address of a vllm-router in front of servers."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    argv = [str(ROUTER), "--worker-urls", *urls, "--policy", "consistent_hash", "--host", "127.0.0.1"]
    with log.open("wb") as out:
        router = subprocess.Popen([*argv, "--port", str(port)], stdout=out, stderr=subprocess.STDOUT)
    try:
        yield address
    finally:
        router.kill()
        router.wait()


async def test_a_real_vllm_behind_it_is_driven_as_without_it(
    server: Server, weights: list[Path], references: list[Reference], tmp_path: Path
) -> None:
    with router_over([server.url], tmp_path / "router.log") as address:
        engine = await connect_router(
            address, [server.url], id="vllm-0", served_name="policy", limits=LIMITS, start_s=60.0
        )
        try:
            for version in (1, 2):
                await engine.update_weights(version, str(weights[version]))
                reply = await engine.generate(request(8, salt=f"routed{version}"))
                assert versions_of(reply) == [version]
                assert_same(reply.logprobs, references[version].logprobs(PROMPT, reply.token_ids))
            assert (await engine.load()).generated_tokens >= 16
        finally:
            await engine.close()


async def test_a_session_stays_on_its_server_and_weights_reach_every_one(tmp_path: Path) -> None:
    async with await serve(tmp_path / "a.log") as a, await serve(tmp_path / "b.log") as b:
        urls = [a.ready["url"], b.ready["url"]]
        with router_over(urls, tmp_path / "router.log") as address:
            engine = await connect_router(
                address,
                urls,
                id="vllm-0",
                served_name="policy",
                limits=LIMITS,
                start_s=60.0,
            )
            assert engine.info.kv_tokens == 8192
            seen: dict[int, Counter[int]] = {}
            for session in range(6):
                for turn in range(3):
                    before = [(await server.load()).generated_tokens for server in engine._servers]
                    ids = np.arange(60 + session, 100 + session, dtype=np.int32)
                    params = SamplingParams(max_tokens=8, seed=session)
                    reply = await engine.generate(
                        GenerateRequest(f"g{session}.t{turn}", ids, params, f"g{session}", "v0")
                    )
                    assert reply.versions == ((0, len(reply.token_ids)),)
                    after = [(await server.load()).generated_tokens for server in engine._servers]
                    grew = [n for n in range(2) if after[n] > before[n]]
                    seen.setdefault(session, Counter()).update(grew)
            assert all(list(places.values()) == [3] for places in seen.values()), seen
            assert len({next(iter(places)) for places in seen.values()}) == 2, "sessions spread over both"
            await engine.update_weights(1, str(POLICY))
            assert [server.version for server in engine._servers] == [1, 1]
            for session in range(6):
                ids = np.arange(60, 100, dtype=np.int32)
                reply = await engine.generate(
                    GenerateRequest(f"n{session}", ids, SamplingParams(max_tokens=4), f"g{session}", "v1")
                )
                assert {version for version, _ in reply.versions} == {1}
            running = [
                asyncio.ensure_future(
                    engine.generate(
                        GenerateRequest(
                            f"x{n}", ids, SamplingParams(max_tokens=400, temperature=9.0), f"g{n}"
                        )
                    )
                )
                for n in range(4)
            ]
            await asyncio.sleep(0.3)
            for n in range(4):
                await engine.abort(f"x{n}")
            assert {reply.finish for reply in await asyncio.gather(*running)} <= {"abort", "stop"}
            await engine.close()
