"""A whole run on a real vLLM, watched from between the two: what was sent and received is what was trained."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from vllm_kit import ROOT, Reference, Server, assert_same, run_to_end

from paceline.transport.layout import ACKS, BATCHES, PROBE_FILE, rank_file, steps_in, weights_dir
from paceline.transport.reader import read_batches

EXAMPLE = ROOT / "examples" / "reverse-text" / "vllm.toml"
STEPS = 15
Call = tuple[list[int], list[int], list[float], list[dict[str, Any]]]
"""Ids sent, ids received, their logprobs, and the spans of versions."""


class Wiretap:
    """A proxy that keeps every generate call; it knows nothing of Paceline."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.calls: list[Call] = []
        self.loads = self.probes = 0
        self.url = ""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Wiretap]:
        limits = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=limits) as self._session:
            app = web.Application(client_max_size=2**26)
            app.router.add_route("*", "/{tail:.*}", self._pass_on)
            runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            try:
                yield self
            finally:
                await runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.Response:
        sent = await request.read()
        url = f"{self.server.url}{request.path_qs}"
        headers = {"Content-Type": "application/json"}
        async with self._session.request(request.method, url, data=sent, headers=headers) as reply:
            got = await reply.read()
        if request.path == "/inference/v1/generate" and reply.status == 200:
            asked = json.loads(sent)
            if asked["request_id"].startswith("probe-"):
                self.probes += 1
                return web.Response(body=got, content_type="application/json")
            choice = json.loads(got)["choices"][0]
            logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
            spans = choice["weight_versions"]
            self.calls.append((asked["token_ids"], choice["token_ids"], logprobs, spans))
        self.loads += request.path == "/collective_rpc" and reply.status == 200
        return web.Response(body=got, status=reply.status, content_type="application/json")


def number(label: str) -> int:
    """A server that has not been updated yet calls its weights `default`."""
    return 0 if label == "default" else int(label.removeprefix("v"))


def sequences(run_dir: Path, step: int) -> Iterator[tuple[Any, Any, Any]]:
    """Ids, trainable mask and logprobs of each sequence of a batch, as a trainer reads them."""
    for batch in read_batches(run_dir, start_step=step, stop=lambda: False):
        for packed in batch.micro_batches:
            ends = np.cumsum(packed.lengths)
            for end, length in zip(ends, packed.lengths, strict=True):
                at = slice(int(end - length), int(end))
                yield packed.token_ids[at], packed.trainable[at], packed.logprobs[at]
        return


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
