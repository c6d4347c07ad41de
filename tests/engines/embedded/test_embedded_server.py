"""The real server process over HTTP. One serves the module; a test that leaves it changed changes it back."""

from __future__ import annotations

import asyncio
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

pytest.importorskip("torch", reason="needs the train extra")
from embedded_kit import VOCAB, plain_logprobs, prompt_of
from test_embedded_engine import spoil

from paceline.engines.embedded import EngineOptions, EngineProcess
from paceline.engines.embedded.engine import Engine
from paceline.engines.embedded.server import Server
from paceline.errors import EngineError

pytestmark = pytest.mark.torch
ModelMaker = Callable[..., Path]
KV_TOKENS = 4096


@pytest.fixture(scope="module")
def engine(model_of: ModelMaker) -> Iterator[EngineProcess]:
    options = EngineOptions(
        model=model_of(), kv_tokens=KV_TOKENS, max_model_len=500, weight_version="v0", seed=3
    )
    process = EngineProcess.start(options)
    yield process
    assert process.stop() == 0


class Client:
    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def get(self, path: str) -> Any:
        async with self.session.get(path) as reply:
            assert reply.status == 200, await reply.text()
            return await reply.json() if reply.content_type == "application/json" else await reply.text()

    async def post(self, path: str, body: Any = None, status: int = 200) -> Any:
        async with self.session.post(path, json=body) as reply:
            answer = await reply.json()
            assert reply.status == status, answer
            return answer if status == 200 else answer["error"]["message"]

    async def complete(self, prompt: list[int], **fields: Any) -> Any:
        body = {
            "prompt": prompt,
            "max_tokens": 8,
            "logprobs": 0,
            "return_token_ids": True,
            "ignore_eos": True,
            **fields,
        }
        return await self.post("/v1/completions", body)

    async def generate(self, prompt: list[int], id: str | None = None, **params: Any) -> Any:
        params = {"max_tokens": 8, "logprobs": 0, "ignore_eos": True, **params}
        body = {"token_ids": prompt, "sampling_params": params} | ({"request_id": id} if id else {})
        return await self.post("/inference/v1/generate", body)

    async def metric(self, name: str) -> float:
        lines: list[str] = (await self.get("/metrics")).splitlines()
        return float(next(line for line in lines if line.startswith(name + "{")).rpartition(" ")[2])

    async def until(self, metric: str, holds: Callable[[float], bool]) -> None:
        """The engine tells nobody when a request starts to run, so this asks until it does."""
        async with asyncio.timeout(20):
            while not holds(await self.metric(metric)):
                pass

    async def push(self, path: Path, version: str) -> None:
        await self.post("/start_weight_update", {})
        await self.post("/update_weights", {"update_info": {"path": str(path)}})
        await self.post("/finish_weight_update", {"weight_version": version})


@pytest.fixture
async def client(engine: EngineProcess) -> AsyncIterator[Client]:
    async with aiohttp.ClientSession(engine.url) as session:
        yield Client(session)


# ---- generation


async def test_it_says_what_it_is_when_it_is_ready(engine: EngineProcess, client: Client) -> None:
    assert engine.ready["event"] == "ready"
    assert engine.ready["kv_cache_size_tokens"] == KV_TOKENS
    (card,) = (await client.get("/v1/models"))["data"]
    assert (card["id"], card["max_model_len"]) == ("policy", 500)
    info = 'vllm:cache_config_info{kv_cache_size_tokens="4096",num_gpu_blocks="256",block_size="16"} 1'
    assert info in await client.get("/metrics")
    await client.get("/health")


async def test_both_routes_give_the_same_tokens_and_exact_logprobs_for_a_seed(
    client: Client, model_of: ModelMaker
) -> None:
    prompt = prompt_of(40)
    completed, generated = await asyncio.gather(
        client.complete(prompt, seed=9), client.generate(prompt, seed=9)
    )
    one, two = completed["choices"][0], generated["choices"][0]
    assert one["prompt_token_ids"] == prompt
    assert one["token_ids"] == two["token_ids"]
    assert one["logprobs"]["tokens"] == [entry["token"] for entry in two["logprobs"]["content"]]
    assert [entry["token_id"] for entry in two["logprobs"]["content"]] == one["token_ids"]
    for logprobs in (
        one["logprobs"]["token_logprobs"],
        [entry["logprob"] for entry in two["logprobs"]["content"]],
    ):
        assert logprobs == pytest.approx(
            plain_logprobs(model_of(), prompt + one["token_ids"], 40).tolist(), abs=1e-4
        )
    assert (one["finish_reason"], one["stop_reason"]) == ("length", None)
    assert two["weight_versions"] == [{"version": "v0", "start": 0, "end": 8}]
    assert generated["timing"].keys() == {"queue_s", "prefill_s", "decode_s"}
    assert min(generated["timing"].values()) >= 0


async def test_usage_counts_prompt_completion_and_cached_tokens(client: Client) -> None:
    prompt = prompt_of(50, 77)
    first, again = await client.complete(prompt), await client.generate(prompt)
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert again["usage"] == {
        "prompt_tokens": 50,
        "completion_tokens": 8,
        "total_tokens": 58,
        "prompt_tokens_details": {"cached_tokens": 48},
    }
    assert again["cached_tokens"] == 48
    salted = await client.complete(prompt, cache_salt="mine")
    assert salted["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_logprobs_and_ids_are_left_out_unless_asked_for(client: Client) -> None:
    choice = (await client.post("/v1/completions", {"prompt": [5, 6], "max_tokens": 2}))["choices"][0]
    assert choice["logprobs"] is None
    assert "token_ids" not in choice


async def test_a_text_prompt_is_encoded_and_the_answer_decoded(client: Client) -> None:
    body = {"prompt": "hello", "max_tokens": 6, "return_token_ids": True, "temperature": 0}
    choice = (await client.post("/v1/completions", body))["choices"][0]
    assert len(choice["prompt_token_ids"]) == 5
    assert choice["text"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": [[1, 2], [3]]}, r"Expected `int`, got `array` - at `\$.prompt\[0\]`"),
        ({"prompt": []}, "empty"),
        ({"prompt": [2] * 500}, "500 tokens, but prompt and output together are limited to 500"),
        ({"prompt": [VOCAB]}, "out of vocabulary"),
        ({"prompt": [2, 1.5]}, r"Expected `int`, got `float` - at `\$.prompt\[1\]`"),
        ({"nonsense": 1}, "nonsense"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 2}, "n=2 is not supported"),
        ({"stream": True}, "stream=true is not supported"),
        ({"presence_penalty": 1}, "presence_penalty"),
        ({"logprobs": 3}, "logprobs"),
    ],
)
async def test_a_request_that_cannot_be_honoured_is_refused_by_name(
    client: Client, change: dict[str, Any], says: str
) -> None:
    message = await client.post("/v1/completions", {"prompt": [5], **change}, status=400)
    with pytest.raises(AssertionError, match=says):
        raise AssertionError(message)


async def test_bad_json_and_an_unknown_model_are_refused(client: Client) -> None:
    for body in (b"{nonsense", b'{"prompt": [5], "user": "\xff"}', b""):
        async with client.session.post("/v1/completions", data=body) as reply:
            assert reply.status == 400
    deep = b"[" * 10_000 + b"]" * 10_000
    for path, body in (("/v1/completions", b'{"prompt": %b}'), ("/abort_requests", b'{"request_ids": %b}')):
        async with client.session.post(path, data=body % deep) as reply:
            assert reply.status == 400, path
    assert "'other'" in await client.post("/v1/completions", {"prompt": [5], "model": "other"}, status=404)
    assert "sampling_params" in await client.post("/inference/v1/generate", {"token_ids": [5]}, status=400)


# ---- aborts


@pytest.mark.parametrize("form", ["{}", "generate-tokens-{}"])
async def test_an_abort_by_id_returns_the_tokens_so_far(client: Client, form: str) -> None:
    started = await client.metric("vllm:generation_tokens_total")
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(client.generate(prompt_of(5), "long", max_tokens=490))
        await client.until("vllm:generation_tokens_total", lambda tokens: tokens > started)
        assert await client.post("/abort_requests", {"request_ids": [form.format("long")]}) == {"aborted": 1}
    choice = task.result()["choices"][0]
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < 490
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])


async def test_an_abort_of_everything_needs_no_ids(client: Client) -> None:
    async with asyncio.TaskGroup() as tasks:
        long = [tasks.create_task(client.complete([5, n], max_tokens=490)) for n in (6, 7)]
        await client.until("vllm:num_requests_running", lambda running: running == 2)
        assert await client.post("/abort_requests", {}) == {"aborted": 2}
    assert [task.result()["choices"][0]["finish_reason"] for task in long] == ["abort", "abort"]


async def test_a_client_that_hangs_up_frees_its_place(client: Client) -> None:
    gone = asyncio.create_task(client.complete(prompt_of(5), max_tokens=490))
    await client.until("vllm:num_requests_running", lambda running: running == 1)
    assert await client.metric("vllm:kv_cache_usage_perc") > 0
    gone.cancel()
    await client.until("vllm:num_requests_running", lambda running: running == 0)
    assert await client.metric("vllm:kv_cache_usage_perc") == 0
    before = await client.metric("paceline:engine_steps_total")
    assert await client.metric("paceline:engine_steps_total") == before


async def test_an_id_in_flight_cannot_be_used_twice(client: Client) -> None:
    await client.post("/pause?mode=keep&clear_cache=false")
    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(client.generate([5], "same"))
        await client.until("vllm:num_requests_waiting", lambda waiting: waiting == 1)
        body = {"token_ids": [5], "sampling_params": {}, "request_id": "same"}
        assert "already in flight" in await client.post("/inference/v1/generate", body, status=400)
        await client.post("/resume")
    assert first.result()["choices"][0]["finish_reason"] == "length"


# ---- pauses and weights


async def test_a_push_while_frozen_is_seen_in_the_spans_and_in_the_probabilities(
    client: Client, model_of: ModelMaker
) -> None:
    started = await client.metric("vllm:generation_tokens_total")
    prompt = prompt_of(20)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(client.generate(prompt, max_tokens=400))
        await client.until("vllm:generation_tokens_total", lambda tokens: tokens > started)
        assert await client.post("/pause?mode=keep") == {"status": "paused"}
        assert await client.get("/is_paused") == {"is_paused": True}
        late = tasks.create_task(client.generate(prompt, seed=1))
        await client.push(model_of(seed=1), "v1")
        assert await client.get("/weight_info") == {"weight_version": "v1"}
        assert await client.post("/resume") == {"status": "resumed"}
    choice = task.result()["choices"][0]
    first, second = choice["weight_versions"]
    cut = first["end"]
    assert (first["version"], second) == ("v0", {"version": "v1", "start": cut, "end": 400})
    ids, logprobs = (
        prompt + choice["token_ids"],
        [entry["logprob"] for entry in choice["logprobs"]["content"]],
    )
    assert logprobs[:cut] == pytest.approx(plain_logprobs(model_of(), ids, 20)[:cut].tolist(), abs=1e-4)
    assert logprobs[cut:] == pytest.approx(plain_logprobs(model_of(seed=1), ids, 20)[cut:].tolist(), abs=1e-4)
    assert late.result()["choices"][0]["weight_versions"] == [{"version": "v1", "start": 0, "end": 8}]
    (held,) = late.result()["choices"]
    expected = plain_logprobs(model_of(seed=1), prompt + held["token_ids"], 20).tolist()
    assert [entry["logprob"] for entry in held["logprobs"]["content"]] == pytest.approx(expected, abs=1e-4)
    await client.push(model_of(), "v0")


async def test_a_reload_by_rpc_changes_the_weights_and_the_label_follows(
    client: Client, model_of: ModelMaker
) -> None:
    prompt = prompt_of(30)
    old = await client.generate(prompt, seed=4)
    for path, version in ((model_of(seed=1), "v1"), (model_of(), "v0")):
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(path)}}
        await client.post("/collective_rpc", body)
        await client.post("/update_weight_version", {"new_version": version})
        new = await client.generate(prompt, seed=4)
        assert new["choices"][0]["weight_versions"][0]["version"] == version
        ids, logprobs = new["choices"][0]["token_ids"], new["choices"][0]["logprobs"]["content"]
        expected = plain_logprobs(path, prompt + ids, 30).tolist()
        assert [entry["logprob"] for entry in logprobs] == pytest.approx(expected, abs=1e-4)
    assert new["choices"][0]["token_ids"] == old["choices"][0]["token_ids"]


async def test_a_push_that_cannot_be_loaded_leaves_weights_and_version_alone(
    client: Client, model_of: ModelMaker, tmp_path: Path
) -> None:
    before = await client.generate(prompt_of(30), seed=4)
    shutil.copytree(model_of(seed=1), tmp_path, dirs_exist_ok=True)
    spoil(tmp_path, "model.embed_tokens.weight", None)
    await client.post("/start_weight_update", {})
    message = await client.post("/update_weights", {"update_info": {"path": str(tmp_path)}}, status=422)
    assert "lacks tensor model.embed_tokens.weight of shape [258, 48]" in message
    assert "no weights were loaded" in await client.post(
        "/finish_weight_update", {"weight_version": "v9"}, status=409
    )
    rpc = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "nowhere")}}
    assert "nowhere" in await client.post("/collective_rpc", rpc, status=422)
    assert await client.get("/weight_info") == {"weight_version": "v0"}
    after = await client.generate(prompt_of(30), seed=4)
    assert after["choices"] == before["choices"]


async def test_weights_are_pushed_in_the_order_of_the_three_phases(
    client: Client, model_of: ModelMaker
) -> None:
    await client.push(model_of(), "v0")
    info = {"update_info": {"path": str(model_of())}}
    assert "start_weight_update first" in await client.post("/update_weights", info, status=409)
    await client.post("/start_weight_update", {})
    assert "`$.update_info`" in await client.post("/update_weights", {"update_info": {}}, status=400)
    assert "'exec'" in await client.post("/collective_rpc", {"method": "exec"}, status=400)


async def test_a_pause_that_waits_answers_when_the_last_request_is_done(client: Client) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(client.complete([5], max_tokens=200))
        await client.until("vllm:num_requests_running", lambda running: running == 1)
        await client.post("/pause?mode=wait")
        assert await client.metric("vllm:num_requests_running") == 0
        held = tasks.create_task(client.complete([5]))
        await client.until("vllm:num_requests_waiting", lambda waiting: waiting == 1)
        await client.post("/resume")
    assert len(running.result()["choices"][0]["token_ids"]) == 200
    assert len(held.result()["choices"][0]["token_ids"]) == 8


async def test_a_pause_aborts_by_default_and_an_unknown_mode_is_refused(client: Client) -> None:
    assert "'sideways'" in await client.post("/pause?mode=sideways", status=400)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(client.complete([5], max_tokens=490))
        await client.until("vllm:num_requests_running", lambda running: running == 1)
        await client.post("/pause")
    assert running.result()["choices"][0]["finish_reason"] == "abort"
    await client.post("/resume")


async def test_the_prefix_cache_is_reset_only_when_nothing_runs_or_when_told_so(client: Client) -> None:
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(client.complete(prompt_of(40, 5), max_tokens=400, temperature=0))
        await client.until("vllm:num_requests_running", lambda running: running == 1)
        assert await client.post("/reset_prefix_cache") == {"success": False}
        assert await client.post("/reset_prefix_cache?reset_running_requests=true") == {"success": True}
    assert await client.post("/reset_prefix_cache") == {"success": True}
    again = await client.complete(prompt_of(40, 5), max_tokens=400, temperature=0)
    assert again["cached_tokens"] == 0
    assert again["choices"][0]["token_ids"] == running.result()["choices"][0]["token_ids"]


async def test_more_requests_than_places_all_get_their_answer(client: Client) -> None:
    prompts = [prompt_of(n % 60 + 1, n) for n in range(150)]
    answers = await asyncio.gather(*(client.complete(prompt, max_tokens=20, seed=0) for prompt in prompts))
    assert all(len(answer["choices"][0]["token_ids"]) == 20 for answer in answers)
    assert await client.metric("vllm:kv_cache_usage_perc") == 0
    assert await client.metric("vllm:num_requests_waiting") == 0


# ---- the process


async def test_with_a_token_every_request_but_a_health_check_needs_it(model_of: ModelMaker) -> None:
    options = EngineOptions(model=model_of(), host="0.0.0.0", token="secret")
    assert "secret" not in options.arguments()
    engine = await asyncio.to_thread(EngineProcess.start, options)
    try:
        async with aiohttp.ClientSession(engine.url) as session:
            async with session.get("/health") as reply:
                assert reply.status == 200
            for headers, status in (
                ({}, 401),
                ({"Authorization": "Bearer sécret"}, 401),
                ({"Authorization": "Bearer secret"}, 200),
            ):
                async with session.get("/v1/models", headers=headers) as reply:
                    assert reply.status == status
    finally:
        assert await asyncio.to_thread(engine.stop) == 0


async def test_a_stream_whose_client_hangs_up_ends_when_its_request_has(model_of: ModelMaker) -> None:
    left: list[set[str]] = []
    ended = asyncio.Event()

    @web.middleware
    async def watch(http: web.Request, handler: Any) -> Any:
        try:
            return await handler(http)
        finally:
            tasks = [task.get_coro() for task in asyncio.all_tasks()]
            left.append({coro.__qualname__ for coro in tasks if coro is not None} & {"Server._run"})
            ended.set()

    server = Server(Engine(EngineOptions(model=model_of(), kv_tokens=KV_TOKENS, max_model_len=500)))
    app = server.app()
    app.middlewares.insert(0, watch)
    try:
        async with TestClient(TestServer(app)) as client:
            params = {"max_tokens": 480, "logprobs": 0, "ignore_eos": True}
            body = {"token_ids": prompt_of(5), "sampling_params": params, "stream": True}
            async with client.post("/inference/v1/generate", json=body) as reply:
                assert (await reply.content.readline()).startswith(b"data: ")
                reply.close()
            async with asyncio.timeout(20):
                await ended.wait()
            assert left == [set()]
    finally:
        await asyncio.to_thread(server.thread.stop)


async def test_an_engine_that_fails_answers_what_was_in_flight_and_is_no_longer_healthy(
    model_of: ModelMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(EngineOptions(model=model_of()))
    monkeypatch.setattr(engine.decoder, "forward", lambda *_: 1 / 0)
    async with TestClient(TestServer(Server(engine).app())) as client:
        async with client.post("/v1/completions", json={"prompt": [5]}) as reply:
            assert reply.status == 500
            assert "ZeroDivisionError" in (await reply.json())["error"]["message"]
        async with client.get("/health") as reply:
            assert reply.status == 503


def test_a_model_it_cannot_run_ends_the_start_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with open(tmp_path / "stderr", "w") as stderr, pytest.raises(EngineError, match="ended with code 2"):
        EngineProcess.start(EngineOptions(model=tmp_path), stderr=stderr)
    assert "model_type None" in (tmp_path / "stderr").read_text()


PARENT = """
import subprocess, sys
engine = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE)
print(engine.stdout.readline().decode().strip(), engine.pid, sep="\\n", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent died")
def test_the_engine_ends_when_the_process_that_started_it_is_killed(model_of: ModelMaker) -> None:
    """No pipe helps here: the engine's stdin is this test's, so only the kernel can tell it."""
    command = [
        sys.executable,
        "-m",
        "paceline.engines.embedded",
        *EngineOptions(model=model_of()).arguments(),
    ]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdin is not None
    with parent.stdout, parent.stdin:
        assert json.loads(parent.stdout.readline())["event"] == "ready"
        engine = os.pidfd_open(int(parent.stdout.readline()))
        try:
            os.kill(parent.pid, signal.SIGKILL)
            parent.wait()
            assert select.select([engine], [], [], 10)[0], "the engine outlived its parent"
        finally:
            os.close(engine)


def test_the_engine_ends_when_its_stdin_does(model_of: ModelMaker) -> None:
    engine = EngineProcess.start(EngineOptions(model=model_of()))
    pipe = engine._popen.stdin
    assert pipe is not None
    pipe.close()
    assert engine._popen.wait(10) == 0
    engine.stop()
