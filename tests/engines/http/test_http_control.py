"""The control side over HTTP: weights, metrics, and what the start-up probe sees."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from fake_server import GENERATE, METRICS, FakeServer, Say
from test_http_generate import LIMITS, QUICK, engine_on, request, until

from paceline.domain.load import EngineInfo, EngineLoad
from paceline.engines.http import Limits, Link, Retry, connect, probe
from paceline.engines.http.metrics import read_kv_tokens, read_load
from paceline.errors import EngineError, EngineUnavailable

UPDATE = [
    "/pause",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/weight_info",
    "/resume",
]


# ---- weights


async def test_new_weights_are_loaded_between_pause_and_resume_and_the_label_is_checked() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        await engine.update_weights(7, "/weights/v7")
        assert fake.paths() == UPDATE
        assert fake.calls[0].query == "mode=keep&clear_cache=true"
        assert (fake.loaded, fake.label, fake.paused, engine.version) == ("/weights/v7", "v7", False, 7)
        assert (await engine.generate(request())).versions == ((7, 4),)


async def test_a_request_that_runs_through_an_update_has_a_run_of_each_version() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        await engine.update_weights(1, "/weights/v1")
        fake.hold = asyncio.Event()
        running = asyncio.ensure_future(engine.generate(request()))
        await until(lambda: bool(fake.running))
        await engine.update_weights(2, "/weights/v2")
        fake.hold.set()
        assert (await running).versions == ((1, 2), (2, 2))


async def test_a_server_that_does_not_load_in_phases_reloads_from_disk_and_is_labelled() -> None:
    async with FakeServer(routes_loading=False) as fake, engine_on(fake) as engine:
        for version in (1, 2):
            fake.calls.clear()
            await engine.update_weights(version, f"/weights/v{version}")
            assert (fake.loaded, fake.label, fake.paused) == (f"/weights/v{version}", f"v{version}", False)
        assert fake.paths() == [
            "/pause",
            "/collective_rpc",
            "/update_weight_version",
            "/weight_info",
            "/resume",
        ]
        assert fake.calls[1].body == {"method": "reload_weights", "kwargs": {"weights_path": "/weights/v2"}}


async def test_a_server_that_keeps_no_label_is_trusted_on_its_word() -> None:
    missing = ("/start_weight_update", "/update_weight_version", "/weight_info")
    async with FakeServer(missing=missing) as fake, engine_on(fake) as engine:
        await engine.update_weights(1, "/weights/v1")
        assert engine.version == 1


@pytest.mark.parametrize("answer", [Say(status=503), Say(breaks="before")])
async def test_s57_a_resume_that_is_refused_or_whose_reply_is_lost_is_sent_again(answer: Say) -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say("/resume", answer)
        await engine.update_weights(1, "/weights/v1")
        assert fake.paths("/resume") == ["/resume", "/resume"]
        assert (fake.paused, engine.version) == (False, 1)


async def test_s57_an_engine_that_never_answers_pause_fails_in_finite_time_and_is_named() -> None:
    limits = Limits(admin_s=0.1)
    async with FakeServer() as fake, engine_on(fake, limits=limits) as engine:
        fake.say("/pause", *[Say(until=asyncio.Event())] * 3)
        began = time.monotonic()
        with pytest.raises(EngineUnavailable, match=rf"{fake.url}.*pause.*no answer within 0.1 s"):
            await engine.update_weights(1, "/weights/v1")
        assert time.monotonic() - began < 3
        assert fake.paths("/pause", "/resume", "/update_weights") == ["/pause", "/resume"], (
            "it hangs: once is enough"
        )
        assert engine.version == 0


async def test_an_update_that_takes_too_long_is_given_up_as_a_whole_and_the_server_resumed() -> None:
    limits = Limits(admin_s=5.0, load_weights_s=0.3)
    async with FakeServer() as fake, engine_on(fake, limits=limits) as engine:
        fake.say("/weight_info", *[Say(until=asyncio.Event())] * 3)  # loaded, but never says what it holds
        began = time.monotonic()
        with pytest.raises(EngineUnavailable, match=r"v1 was not in within 0.3 s \(engine.load_s\)"):
            await engine.update_weights(1, "/weights/v1")
        assert time.monotonic() - began < 5
        assert (engine.version, fake.paused) == (0, False)


@pytest.mark.parametrize("route", ["/start_weight_update", "/update_weights", "/finish_weight_update"])
async def test_s63_a_load_that_fails_resumes_the_engine_and_never_flips_its_version(route: str) -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say(route, Say(status=500, body={"error": {"message": "no such directory"}}))
        with pytest.raises(EngineError, match=f"engine e0.*{route}.*no such directory"):
            await engine.update_weights(1, "/weights/v1")
        assert (fake.paused, engine.version, fake.label) == (False, 0, "default")


async def test_a_failed_load_is_ended_before_the_engine_resumes() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say("/update_weights", Say(status=400))
        with pytest.raises(EngineError):
            await engine.update_weights(1, "/weights/v1")
        assert fake.paths()[-2:] == ["/finish_weight_update", "/resume"]
        assert fake.calls[-2].body == {}


async def test_an_engine_that_says_it_holds_another_version_is_not_believed() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say("/weight_info", Say(body={"weight_version": "v3"}))
        with pytest.raises(EngineError, match=r"given v4 .* holds v3"):
            await engine.update_weights(4, "/weights/v4")
        assert (fake.paused, engine.version) == (False, 0)


async def test_a_cancelled_update_resumes_the_engine() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say("/update_weights", Say(until=asyncio.Event()))
        loading = asyncio.ensure_future(engine.update_weights(1, "/weights/v1"))
        await until(lambda: "/update_weights" in fake.paths())
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert not fake.paused
        assert fake.paths()[-1] == "/resume"


async def test_a_server_that_cannot_pause_is_refused_with_the_remedy() -> None:
    async with FakeServer(missing=("/pause",)) as fake, engine_on(fake) as engine:
        with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1"):
            await engine.update_weights(1, "/weights/v1")


async def test_an_address_that_nobody_listens_at_is_an_error_without_words_of_tls() -> None:
    link = Link("http://127.0.0.1:1", "engine e0", Limits(), Retry(attempts=1))
    with pytest.raises(EngineError) as refused:
        await link.call("GET", "/health")
    assert str(refused.value) == "engine e0: GET /health: cannot connect: Connection refused (try 1)"
    await link.close()


# ---- metrics


async def test_the_load_is_read_off_the_metrics_page() -> None:
    async with FakeServer() as fake, engine_on(fake) as engine:
        assert await engine.load() == EngineLoad(
            running=3,
            waiting=2,
            kv_usage=0.25,
            preemptions=1,
            prefix_queries=1000,
            prefix_hits=640,
            generated_tokens=12345,
        )
        assert engine.info == EngineInfo(id="e0", kv_tokens=8192, max_model_len=4096)


@pytest.mark.parametrize(
    "answer", [Say(until=asyncio.Event()), Say(status=500), Say(breaks="middle"), Say(body=b"hi")]
)
async def test_metrics_that_hang_or_fail_are_an_error_in_finite_time(answer: Say) -> None:
    async with FakeServer() as fake, engine_on(fake, limits=Limits(metrics_s=0.1)) as engine:
        fake.say("/metrics", answer)
        with pytest.raises(EngineError, match=r"engine e0.*metrics"):
            await engine.load()
        assert (await engine.load()).running == 3


def test_ranks_of_one_server_are_added_and_the_fullest_speaks_for_usage() -> None:
    second = METRICS.replace('engine="0"', 'engine="1"').replace(" 0.25", " 0.75")
    load = read_load((METRICS + second).encode())
    assert (load.running, load.waiting, load.kv_usage, load.prefix_hits) == (6, 4, 0.75, 1280)
    assert read_kv_tokens((METRICS + second).encode()) == 16384


def test_capacity_is_told_by_blocks_where_tokens_are_not_and_none_where_nothing_is() -> None:
    assert read_kv_tokens(b'vllm:cache_config_info{block_size="32",num_gpu_blocks="100"} 1.0\n') == 3200
    assert read_kv_tokens(b"nothing\n") is None


def test_the_older_name_of_the_usage_gauge_is_known() -> None:
    page = METRICS.replace("kv_cache_usage_perc", "gpu_cache_usage_perc").encode()
    assert read_load(page).kv_usage == 0.25


def test_a_large_page_is_read_in_about_a_millisecond() -> None:
    filler = 'vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.5",model_name="policy"} 12.0\n' * 1200
    page = (filler + METRICS + filler).encode()
    best = min(_timed(page) for _ in range(5))
    assert best < 0.02


def _timed(page: bytes) -> float:
    began = time.perf_counter()
    read_load(page)
    return time.perf_counter() - began


# ---- the probe


async def test_a_wrong_model_name_is_refused_with_the_names_that_are_served() -> None:
    async with FakeServer(model="llama") as fake:
        with pytest.raises(
            EngineError, match=r"serves no model 'policy' \(it serves: llama\).*--served-model-name"
        ):
            await connect(fake.url, id="e0", served_name="policy", limits=LIMITS, start_s=2.0)


async def test_the_probe_tells_raw_logprobs_from_processed_ones() -> None:
    for raw in (False, True):
        async with FakeServer(raw_logprobs=raw) as fake, engine_on(fake) as engine:
            assert engine.facts.processed_logprobs is not raw


async def test_the_probe_waits_for_a_server_that_is_starting() -> None:
    async with FakeServer() as fake:
        fake.say("/v1/models", Say(status=503), Say(breaks="before"))
        async with engine_on(fake) as engine:
            assert engine.facts.models == ("policy",)


async def test_a_server_that_never_comes_up_is_named_with_the_last_cause() -> None:
    with pytest.raises(
        EngineError, match=r"http://127.0.0.1:1\).*not up after 0.2 s \(start_s\).*cannot connect"
    ):
        await connect("http://127.0.0.1:1", id="e0", served_name="policy", retry=QUICK, start_s=0.2)


async def test_a_wrong_key_is_refused_at_once_and_the_key_is_not_told() -> None:
    async with FakeServer() as fake:
        fake.say("/v1/models", Say(status=401))
        with pytest.raises(EngineError, match="api_key_env") as caught:
            await connect(fake.url, id="e0", served_name="policy", api_key="sk-secret", start_s=2.0)
        assert "sk-secret" not in str(caught.value)
        assert fake.calls[0].headers["Authorization"] == "Bearer sk-secret"


async def test_a_server_left_paused_is_told_at_the_start_instead_of_waited_for() -> None:
    async with FakeServer() as fake:
        fake.paused = True
        with pytest.raises(EngineError, match="is paused"):
            await connect(fake.url, id="e0", served_name="policy", limits=LIMITS, start_s=2.0)
        assert GENERATE not in fake.paths()


async def test_a_server_updated_by_this_run_before_says_which_version_it_holds() -> None:
    async with FakeServer() as fake:
        fake.label = "v12"
        async with engine_on(fake) as engine:
            assert engine.version == 12


async def test_all_that_is_wrong_with_a_server_is_told_at_once() -> None:
    text_only = {"choices": [{"text": "alla", "finish_reason": "stop"}]}
    async with FakeServer(model="llama", reply=lambda _body: text_only) as fake:
        fake.label = "theirs"
        link = Link(fake.url, "engine e0", LIMITS, QUICK)
        try:
            facts = await probe(link, "policy", start_s=2.0)
        finally:
            await link.close()
    assert [problem.text.split(":")[1][:24] for problem in facts.problems] == [
        " serves no model 'policy",
        " /weight_info",
        " the engine did not retu",
    ]


# ---- the check after a load


class Checked:
    """Refuses what it is told to."""

    def __init__(self, before: str = "", after: str = "") -> None:
        self.refuses = {"before": before, "after": after}

    async def before(self, path: str) -> None:
        if self.refuses["before"]:
            raise EngineError(self.refuses["before"])

    async def after(self, engine: Any, version: int, path: str) -> None:
        assert (await engine.generate(request("probe"))).finish == "length"
        if self.refuses["after"]:
            raise EngineError(self.refuses["after"])


async def test_a_server_that_serves_a_mixture_never_flips_its_version() -> None:
    async with FakeServer() as fake, engine_on(fake, check=Checked(after="serves a mixture")) as engine:
        with pytest.raises(EngineError, match="serves a mixture"):
            await engine.update_weights(1, "/weights/v1")
        assert (engine.version, fake.paused) == (0, False)


async def test_what_is_not_there_is_not_loaded() -> None:
    async with FakeServer() as fake, engine_on(fake, check=Checked(before="no weights")) as engine:
        with pytest.raises(EngineError, match="no weights"):
            await engine.update_weights(1, "/weights/v1")
        assert fake.calls == []


async def test_a_load_that_passes_its_check_flips_the_version() -> None:
    async with FakeServer() as fake, engine_on(fake, check=Checked()) as engine:
        await engine.update_weights(1, "/weights/v1")
        assert engine.version == 1
        assert fake.paths() == [*UPDATE, GENERATE]


async def test_s68_a_transfer_that_fails_midway_is_begun_again_as_a_whole() -> None:
    broken = Say(status=500, body={"error": {"message": "chunk 2 of 3 was lost"}})
    async with FakeServer() as fake, engine_on(fake) as engine:
        fake.say("/update_weights", broken)
        with pytest.raises(EngineError, match="chunk 2 of 3 was lost"):
            await engine.update_weights(8, "/weights/v8")
        assert (engine.version, fake.label, fake.paused) == (0, "default", False)
        fake.calls.clear()
        await engine.update_weights(8, "/weights/v8")
        steps = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
        assert fake.paths(*steps) == steps
        assert (engine.version, fake.label) == (8, "v8")


async def test_s68_weights_that_never_come_whole_are_on_no_token() -> None:
    broken = Say(status=500, body={"error": {"message": "chunk 2 of 3 was lost"}})
    async with FakeServer() as fake, engine_on(fake) as engine:
        for _ in range(3):  # as often as the core asks, before it holds the engine out
            fake.say("/update_weights", broken)
            with pytest.raises(EngineError, match="chunk 2 of 3 was lost"):
                await engine.update_weights(8, "/weights/v8")
        assert (engine.version, fake.label, fake.paused) == (0, "default", False)
        assert {version for version, _ in (await engine.generate(request())).versions} == {0}
