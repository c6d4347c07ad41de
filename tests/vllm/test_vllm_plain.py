"""A vLLM as people start it: no route for versions, raw logprobs, and here little memory. Killed in the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_kit import (
    PROMPT,
    URL,
    VLLM,
    Reference,
    Server,
    assert_a_stream_is_the_whole,
    assert_same,
    engine_on,
    generating,
    request,
    serving,
    versions_of,
)

from paceline.cli.checks import diagnose
from paceline.config import RunConfig
from paceline.config.load import load
from paceline.errors import EngineError

pytestmark = pytest.mark.skipif(
    bool(URL) and not VLLM, reason="starts a server of its own: run `make test-vllm`"
)
CONFIG = """
[model]
name = "pkg:paceline/assets/small_policy"
[sampling]
temperature = {temperature}
max_tokens = 16
[[env]]
id = "reverse-text"
[batch]
rollouts = 16
seq_len = 128
[engine]
type = "vllm"
urls = ["{url}"]
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """1,024 tokens of KV: two of the longest contexts."""
    log = tmp_path_factory.mktemp("vllm-plain") / "server.log"
    options = ("--max-model-len", "512", "--kv-cache", "1M", "--raw-logprobs", "--completions-only")
    with serving(log, *options) as server:
        yield server


async def test_completions_are_used_where_there_is_nothing_newer(
    plain: Server, references: list[Reference]
) -> None:
    async with engine_on(plain) as engine:
        facts = engine.facts
        assert (facts.route, facts.problems, facts.processed_logprobs) == ("/v1/completions", (), False)
        assert engine.info.kv_tokens == 1024
        reply = await engine.generate(request(32, salt="a"))
        again = await engine.generate(request(1, salt="a"))
    assert_same(reply.logprobs, references[0].logprobs(PROMPT, reply.token_ids))
    assert versions_of(reply) == [0]
    assert again.cached_tokens == 64


async def test_a_completion_that_is_streamed_is_the_one_that_comes_whole(plain: Server) -> None:
    async with engine_on(plain) as engine:
        await assert_a_stream_is_the_whole(engine)


async def test_weights_are_loaded_and_counted_without_version_spans(
    plain: Server, references: list[Reference]
) -> None:
    async with engine_on(plain) as engine:
        for version in (1, 0):
            await engine.update_weights(version, str(references[version].directory))
            reply = await engine.generate(request(8, salt=f"w{version}"))
            assert versions_of(reply) == [version]
            assert_same(reply.logprobs, references[version].logprobs(PROMPT, reply.token_ids))


@pytest.mark.usefixtures("endless")
async def test_an_aborted_completion_keeps_its_tokens(plain: Server, references: list[Reference]) -> None:
    async with engine_on(plain) as engine:
        whole = request(400)
        running = asyncio.ensure_future(engine.generate(whole))
        await generating(engine)
        await engine.abort(whole.request_id)
        reply = await running
    assert reply.finish == "abort"
    assert 0 < len(reply.token_ids) < 400
    assert_same(reply.logprobs, references[0].logprobs(PROMPT, reply.token_ids))


@pytest.mark.usefixtures("endless")
async def test_requests_that_are_preempted_again_and_again_stay_exact(
    plain: Server, references: list[Reference]
) -> None:
    async with engine_on(plain) as engine:
        prompts = [PROMPT[: 40 + i] for i in range(10)]
        before = (await engine.load()).preemptions
        replies = await asyncio.gather(
            *(engine.generate(request(160, prompt, seed=i)) for i, prompt in enumerate(prompts))
        )
        load = await engine.load()
    assert load.preemptions > before
    for prompt, reply in zip(prompts, replies, strict=True):
        assert len(reply.token_ids) == 160
        assert_same(reply.logprobs, references[0].logprobs(prompt, reply.token_ids))


@pytest.mark.parametrize(("temperature", "refused"), [(1.0, False), (0.7, True)])
async def test_doctor_refuses_raw_logprobs_where_they_would_be_wrong(
    plain: Server, tmp_path: Path, temperature: float, refused: bool
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(temperature=temperature, url=plain.url))
    findings = await diagnose(load(RunConfig, [path]), limit_s=60)
    errors = [f for f in findings if f.level == "error"]
    assert [f.remedy for f in errors] == (
        ["start it with --logprobs-mode processed_logprobs, or sample at temperature 1"] if refused else []
    )


async def test_doctor_refuses_a_wrong_name_and_says_which_is_right(plain: Server, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    text = CONFIG.format(temperature=1.0, url=plain.url).replace(
        "[sampling]", 'served_name = "llama"\n[sampling]'
    )
    path.write_text(text)
    errors = [f for f in await diagnose(load(RunConfig, [path]), limit_s=60) if f.level == "error"]
    assert "serves no model 'llama' (it serves: policy)" in f"{errors[0].what} {errors[0].facts}"


@pytest.mark.usefixtures("endless")
async def test_a_server_that_is_killed_in_the_middle_of_a_call_is_an_error_at_once(plain: Server) -> None:
    async with engine_on(plain) as engine:
        running = [asyncio.ensure_future(engine.generate(request(400, seed=i))) for i in range(4)]
        await generating(engine)
        plain.kill()
        began = time.monotonic()
        ends = await asyncio.gather(*running, return_exceptions=True)
        took = time.monotonic() - began
        assert all(isinstance(end, EngineError) for end in ends), ends
        assert took < 10
        with pytest.raises(EngineError, match="metrics"):
            await engine.load()
