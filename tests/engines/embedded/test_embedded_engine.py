from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs the train extra")
import torch
from embedded_kit import (
    EOS,
    KINDS,
    PAD,
    VOCAB,
    Driver,
    edit_config,
    make_model,
    plain_logprobs,
    prompt_of,
    worst_error,
)
from safetensors.torch import load_file, save_file

from paceline.engines.embedded.scheduler import Request, RequestError
from paceline.errors import ConfigError, WireError

pytestmark = pytest.mark.torch
ModelMaker = Callable[..., Path]
EXACT = 1e-4
BLOCK = 16


@pytest.fixture
def model(model_of: ModelMaker) -> Path:
    return model_of()


@pytest.fixture
def other(model_of: ModelMaker) -> Path:
    return model_of(seed=1)


# ---- exactness


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_logprobs_are_those_of_a_plain_forward_pass_with_chunks_and_preemptions(
    model_of: ModelMaker, kind: str, tied: bool
) -> None:
    model = model_of(kind, tied=tied)
    driver = Driver(model, kv_tokens=256, max_batched_tokens=24, max_model_len=160)
    for index in range(10):
        temperature = (1.0, 0.7, 0.0)[index % 3]
        driver.add(
            f"{index}", prompt_of((3, 40, 90)[index % 3], index), temperature=temperature, max_tokens=50
        )
    driver.run()
    assert driver.engine.scheduler.counters.preemptions > 0
    assert {len(request.output) for request in driver.done.values()} == {50}
    assert max(worst_error(model, request) for request in driver.done.values()) < EXACT


def test_a_sequence_that_fills_the_context_is_exact_to_its_end(model: Path) -> None:
    driver = Driver(model, kv_tokens=512)
    request = driver.ask("a", prompt_of(5), max_tokens=None)
    assert len(request.ids) == 512
    assert request.finish_reason == "length"
    assert worst_error(model, request) < EXACT


def test_both_spellings_of_the_rope_base_are_understood(tmp_path: Path) -> None:
    model = make_model(tmp_path / "new", rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    old = Path(shutil.copytree(model, tmp_path / "old"))
    edit_config(old, rope_parameters=..., rope_theta=500.0)
    newer, older = (Driver(path).ask("a", prompt_of(60)) for path in (model, old))
    assert newer.ids == older.ids
    assert worst_error(model, newer) < EXACT


def test_a_sharded_checkpoint_is_read_whole(model: Path, tmp_path: Path) -> None:
    from embedded_kit import plain

    plain(model).save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert Driver(tmp_path).ask("a", prompt_of(20)).ids == Driver(model).ask("a", prompt_of(20)).ids


def test_bfloat16_stays_near_the_full_precision_logprobs(model: Path) -> None:
    request = Driver(model, dtype="bfloat16").ask("a", prompt_of(40))
    assert worst_error(model, request) < 0.2


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gpt2"},
        {"hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"quantization_config": {"quant_method": "fp8"}},
        {"vocab_size": ...},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_model_it_would_compute_wrongly_is_refused(
    model: Path, tmp_path: Path, change: dict[str, object]
) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, **change)
    with pytest.raises(ConfigError):
        Driver(tmp_path)


def test_a_context_that_the_cache_cannot_hold_is_refused_with_both_numbers(model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"max_model_len 200 .* 512 positions and the KV cache's 128 tokens"
    ):
        Driver(model, kv_tokens=128, max_model_len=200)
    assert Driver(model, kv_tokens=128).engine.max_len == 128


# ---- prefix sharing


def test_a_group_that_arrives_together_computes_its_prompt_once(model: Path) -> None:
    driver = Driver(model)
    for member in range(8):
        driver.add(f"{member}", prompt_of(100), seed=member)
    driver.run(1)
    assert driver.engine.scheduler.pool.referenced == 100 // BLOCK + 8
    driver.run()
    cached = [driver.done[f"{member}"].cached_tokens for member in range(8)]
    assert cached == [0] + [100 // BLOCK * BLOCK] * 7
    counters = driver.engine.scheduler.counters
    assert (counters.prefix_queries, counters.prefix_hits) == (800, 7 * 96)
    assert max(worst_error(model, request) for request in driver.done.values()) < EXACT


def test_the_next_turn_finds_prompt_and_answer_of_the_last(model: Path) -> None:
    driver = Driver(model)
    first = driver.ask("turn 1", prompt_of(50), max_tokens=40)
    second = driver.ask("turn 2", first.ids + prompt_of(20, 1))
    # The last sampled token was never computed, so the block it would fill is not there.
    assert second.cached_tokens == (90 - 1) // BLOCK * BLOCK
    assert worst_error(model, second) < EXACT


def test_an_exact_repeat_computes_at_least_one_token(model: Path) -> None:
    driver = Driver(model)
    first, second = (driver.ask(id, prompt_of(64)) for id in "ab")
    assert (first.cached_tokens, second.cached_tokens) == (0, 48)
    assert first.ids == second.ids


def test_another_salt_shares_nothing(model: Path) -> None:
    driver = Driver(model)
    cached = [
        driver.ask(f"{n}", prompt_of(64), salt).cached_tokens for n, salt in enumerate(("a", "b", "a", None))
    ]
    assert cached == [0, 0, 48, 0]


# ---- weights


@pytest.mark.parametrize("paused", [False, True], ids=["running", "paused"])
def test_a_swap_in_mid_flight_is_stamped_exactly_and_recomputes_under_the_new_weights(
    model: Path, other: Path, paused: bool
) -> None:
    driver = Driver(model, weight_version="v0", max_batched_tokens=32)
    for index in range(4):
        driver.add(f"{index}", prompt_of(40, index), temperature=0.0 if index % 2 else 1.0, max_tokens=30)
    driver.run(12)
    if paused:
        driver.engine.pause("keep", True, lambda: None)
    driver.engine.swap(driver.engine.load(other), "v1")
    driver.engine.resume()
    driver.run()
    for request in driver.done.values():
        (v0, start, cut), (v1, begin, end) = driver.engine.version_spans(request)
        assert (v0, start, v1, begin, end) == ("v0", 0, "v1", cut, 30)
        assert 0 < cut < 30
        old = plain_logprobs(model, request.ids, request.prompt_tokens)[:cut]
        new = plain_logprobs(other, request.ids, request.prompt_tokens)[cut:]
        assert torch.allclose(torch.tensor(request.logprobs).double(), torch.cat([old, new]), atol=EXACT)
        fresh = Driver(other).ask(
            "fresh", request.ids[: request.prompt_tokens + cut], temperature=0.0, max_tokens=30 - cut
        )
        if request.params.temperature == 0:
            assert fresh.output == request.output[cut:]
    assert driver.engine.scheduler.counters.recomputed_tokens > 0
    assert driver.engine.scheduler.counters.preemptions == 0


def test_a_prompt_seen_under_old_weights_is_answered_as_by_a_fresh_engine(model: Path, other: Path) -> None:
    driver = Driver(model)
    driver.ask("old", prompt_of(100))
    driver.engine.swap(driver.engine.load(other), "v1")
    again, fresh = driver.ask("new", prompt_of(100)), Driver(other).ask("fresh", prompt_of(100))
    assert again.cached_tokens == 0
    assert again.ids == fresh.ids
    assert again.logprobs == pytest.approx(fresh.logprobs, abs=EXACT)


def test_old_kv_is_kept_on_request_and_then_never_found_by_others(model: Path, other: Path) -> None:
    driver = Driver(model)
    kept = driver.add("kept", prompt_of(100), max_tokens=40)
    driver.run(10)
    driver.engine.pause("keep", False, lambda: None)
    driver.engine.swap(driver.engine.load(other), "v1")
    driver.engine.resume()
    driver.run()
    assert driver.engine.scheduler.counters.recomputed_tokens == 0
    assert worst_error(other, kept) > 0.01
    later = driver.ask("later", kept.ids[:-1])
    assert later.cached_tokens == 0
    assert worst_error(other, later) < EXACT
    # The first blocks are there now, of the new weights; nothing of the old ones must hang on behind them.
    again = driver.ask("again", kept.ids[:-1])
    assert again.cached_tokens > 0
    assert worst_error(other, again) < EXACT


def test_a_label_that_follows_the_weights_names_the_tokens_already_sampled_from_them(
    model: Path, other: Path
) -> None:
    driver = Driver(model, weight_version="v0")
    request = driver.add("a", prompt_of(10), max_tokens=9)
    driver.run(3)
    driver.engine.swap(driver.engine.load(other))
    driver.run(3)
    driver.engine.relabel("v1")
    driver.run()
    assert driver.engine.version_spans(request) == [("v0", 0, 3), ("v1", 3, 9)]


def spoil(directory: Path, name: str, value: torch.Tensor | None) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors.pop(name, None)
    if value is not None:
        tensors[name] = value
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, r"lacks tensor model.norm.weight of shape \[48\]"),
        (torch.ones(47), r"model.norm.weight has shape \[47\], expected \[48\]"),
        (torch.full((48,), float("nan")), "model.norm.weight holds values that are not finite"),
    ],
    ids=["missing", "mis-shaped", "not finite"],
)
def test_weights_that_do_not_fit_are_refused_by_tensor_and_the_old_ones_stay(
    model: Path, other: Path, tmp_path: Path, value: torch.Tensor | None, says: str
) -> None:
    driver = Driver(model)
    before = driver.ask("before", prompt_of(30))
    shutil.copytree(other, tmp_path, dirs_exist_ok=True)
    spoil(tmp_path, "model.norm.weight", value)
    with pytest.raises(WireError, match=says):
        driver.engine.load(tmp_path)
    assert driver.ask("after", prompt_of(30)).ids == before.ids


def test_weights_of_another_arithmetic_or_with_tensors_to_spare_are_refused(
    model: Path, other: Path, tmp_path: Path
) -> None:
    engine = Driver(model).engine
    shutil.copytree(other, tmp_path, dirs_exist_ok=True)
    edit_config(tmp_path, rms_norm_eps=0.5)
    with pytest.raises(WireError, match=r"norm_eps is 0.5, but this engine runs 1e-06"):
        engine.load(tmp_path)
    (tmp_path / "config.json").unlink()  # weights alone are enough
    assert engine.load(tmp_path).spec == engine.spec
    spoil(tmp_path, "model.layers.0.self_attn.q_proj.bias", torch.zeros(64))
    with pytest.raises(WireError, match=r"holds tensor model.layers.0.self_attn.q_proj.bias"):
        engine.load(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(WireError, match="cannot read weights"):
        engine.load(tmp_path)


# ---- determinism


def test_a_seed_gives_the_same_tokens_whatever_the_batch_mates_order_and_capacity(model: Path) -> None:
    alone = [Driver(model).ask("a", prompt_of(30, n), seed=n, max_tokens=40).output for n in range(6)]
    for order, kv_tokens in ((range(6), 4096), (reversed(range(6)), 4096), (range(6), 192)):
        driver = Driver(model, kv_tokens=kv_tokens, max_batched_tokens=64)
        for n in order:
            driver.add(f"{n}", prompt_of(30, n), seed=n, max_tokens=40)
            driver.run(n % 3)
        driver.run()
        assert [driver.done[f"{n}"].output for n in range(6)] == alone


def test_a_request_cut_in_two_continues_as_if_it_had_not_been(model: Path) -> None:
    whole = Driver(model).ask("whole", prompt_of(30), seed=5, max_tokens=30)
    first = Driver(model).ask("first", prompt_of(30), seed=5, max_tokens=11)
    second = Driver(model).ask("second", first.ids, seed=5, max_tokens=19)
    assert second.ids == whole.ids


def test_requests_without_a_seed_differ_but_the_engine_seed_repeats_them(model: Path) -> None:
    def answers(seed: int) -> list[list[int]]:
        driver = Driver(model, seed=seed)
        return [driver.ask(id, prompt_of(10), seed=None).output for id in "ab"]

    assert answers(1) == answers(1)
    assert len({tuple(output) for output in (*answers(1), *answers(2))}) == 4


@pytest.mark.parametrize("seed", [2**32, 2**63 - 1, 2**64 - 1, 10**26])
def test_a_large_seed_of_the_engine_is_as_good_as_a_small_one(model: Path, seed: int) -> None:
    def answers(seed: int) -> list[int]:
        return Driver(model, seed=seed).ask("a", prompt_of(10), seed=None).output

    assert answers(seed) == answers(seed) != answers(seed % 2**32)


# ---- endings


def test_an_aborted_request_keeps_its_tokens_and_frees_its_place(model: Path) -> None:
    driver = Driver(model, max_num_seqs=2)
    expected = Driver(model).ask("a", prompt_of(30)).output
    for id in ("runs", "stays", "waits"):
        driver.add(id, prompt_of(30))
    driver.run(5)
    assert driver.engine.abort({"runs", "waits", "unknown"}) == 2
    assert {id: r.output for id, r in driver.done.items()} == {"runs": expected[:5], "waits": []}
    assert {r.finish_reason for r in driver.done.values()} == {"abort"}
    driver.run()
    assert driver.done["stays"].output == expected
    assert driver.engine.scheduler.pool.referenced == 0


def test_a_finished_sequence_is_replaced_in_the_next_step(model: Path) -> None:
    driver = Driver(model, max_num_seqs=1)
    driver.add("a", prompt_of(5), max_tokens=3)
    second = driver.add("b", prompt_of(6), max_tokens=3)
    driver.run(4)
    assert len(second.output) == 1


def test_end_tokens_and_stop_tokens_end_a_sequence_and_are_part_of_it(model: Path) -> None:
    free = Driver(model).ask("free", prompt_of(30), max_tokens=40)
    cut = next(n for n in range(5, 40) if free.output.index(free.output[n]) == n)
    stopped = Driver(model).ask("stop", prompt_of(30), max_tokens=40, stop_token_ids=[free.output[cut]])
    assert stopped.output == free.output[: cut + 1]
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", free.output[cut])


def test_the_end_of_sequence_token_ends_it_without_a_reason_unless_ignored(
    model: Path, tmp_path: Path
) -> None:
    free = Driver(model).ask("free", prompt_of(30))
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": [{EOS}, {free.output[3]}]}}')
    ended = Driver(tmp_path).ask("a", prompt_of(30), ignore_eos=False)
    assert ended.output == free.output[: free.output.index(free.output[3]) + 1]
    assert (ended.finish_reason, ended.stop_reason) == ("stop", None)
    assert Driver(tmp_path).ask("a", prompt_of(30)).ids == free.ids


def test_before_min_tokens_nothing_ends_a_sequence(model: Path) -> None:
    free = Driver(model).ask("free", prompt_of(30), temperature=0.0)
    late = Driver(model).ask(
        "late", prompt_of(30), temperature=0.0, stop_token_ids=[free.output[2], free.output[4]], min_tokens=10
    )
    assert len(late.output) >= 10
    assert not {free.output[2], free.output[4]} & set(late.output[:10])


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_across_tokens_ends_the_sequence_and_cuts_the_text(model: Path, included: bool) -> None:
    driver = Driver(model, kv_tokens=1024)
    for seed in range(100):
        free = driver.ask(f"free {seed}", prompt_of(30), seed=seed, max_tokens=60)
        text = driver.engine.text(free)
        found = [
            at
            for at in range(10, len(text) - 3)
            if text[at : at + 2].isascii() and text.find(text[at : at + 2]) == at
        ]
        if found:
            break
    stop = text[found[0] : found[0] + 2]
    stopped = driver.ask(
        "stop",
        prompt_of(30),
        seed=seed,
        max_tokens=60,
        stop=["never there", stop],
        include_stop_str_in_output=included,
    )
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
    assert stopped.output == free.output[: len(stopped.output)]
    assert len(stopped.output) < 60
    assert driver.engine.text(stopped) == text[: found[0] + (2 if included else 0)]


def test_max_tokens_beyond_the_context_is_clamped(model: Path) -> None:
    request = Driver(model, max_model_len=50).ask("a", prompt_of(30), max_tokens=10_000)
    assert len(request.output) == 20


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ([], "empty"),
        ([2] * 50, "the prompt has 50 tokens, but prompt and output together are limited to 50"),
        ([2, VOCAB], f"token id {VOCAB} is out of vocabulary"),
        ([PAD, -1], "token id -1 is out of vocabulary"),
    ],
    ids=["empty", "too long", "beyond", "negative"],
)
def test_a_prompt_that_cannot_be_served_is_refused(model: Path, prompt: list[int], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        Driver(model, max_model_len=50).add("a", prompt)


# ---- pausing


def paused(driver: Driver, mode: str, clear_cache: bool = True) -> list[str]:
    told: list[str] = []
    driver.engine.pause(mode, clear_cache, lambda: told.append(mode))  # type: ignore[arg-type]
    return told


@pytest.mark.parametrize("clear_cache", [True, False])
def test_a_pause_that_keeps_freezes_requests_and_newcomers_and_changes_no_token(
    model: Path, clear_cache: bool
) -> None:
    expected = Driver(model).ask("a", prompt_of(30)).output
    driver = Driver(model)
    driver.add("before", prompt_of(30))
    driver.run(5)
    assert paused(driver, "keep", clear_cache) == ["keep"]
    driver.add("during", prompt_of(30))
    assert not driver.engine.has_work
    driver.engine.resume()
    driver.run()
    assert driver.done["before"].output == driver.done["during"].output == expected


def test_a_pause_that_waits_ends_when_the_last_request_did_and_holds_newcomers(model: Path) -> None:
    driver = Driver(model, max_num_seqs=1)
    driver.add("a", prompt_of(30))
    driver.add("b", prompt_of(30))
    driver.run(5)
    told = paused(driver, "wait")
    driver.add("held", prompt_of(30))
    assert not told
    driver.run()
    assert told == ["wait"]
    assert set(driver.done) == {"a", "b"}
    driver.engine.resume()
    driver.run()
    assert driver.done["held"].finish_reason == "length"


def test_a_pause_that_aborts_returns_tokens_at_once_and_a_held_request_can_be_aborted_too(
    model: Path,
) -> None:
    driver = Driver(model)
    driver.add("a", prompt_of(30))
    driver.run(5)
    assert paused(driver, "abort") == ["abort"]
    assert len(driver.done["a"].output) == 5
    driver.add("held", prompt_of(30))
    assert driver.engine.abort(None) == 1
    assert driver.done["held"].output == []
    driver.engine.resume()
    assert not driver.engine.has_work


@pytest.mark.parametrize(
    ("mode", "clear_cache", "cached"), [("keep", True, 0), ("wait", True, 0), ("abort", False, 48)]
)
def test_a_pause_clears_the_prefix_cache_unless_told_not_to(
    model: Path, mode: str, clear_cache: bool, cached: int
) -> None:
    driver = Driver(model)
    driver.ask("before", prompt_of(64))
    assert paused(driver, mode, clear_cache)
    driver.engine.resume()
    assert driver.ask("after", prompt_of(64)).cached_tokens == cached


def test_resuming_answers_a_pause_that_still_waits(model: Path) -> None:
    driver = Driver(model)
    driver.add("a", prompt_of(30))
    told = paused(driver, "wait")
    driver.engine.resume()
    assert told == ["wait"]


# ---- pressure


def test_the_last_to_run_is_preempted_first_and_runs_again_before_those_that_never_ran(model: Path) -> None:
    driver = Driver(model, kv_tokens=128, max_model_len=100, max_num_seqs=3)
    for id in "abcd":
        driver.add(id, prompt_of(30, ord(id)), max_tokens=60)
    driver.run()
    assert driver.done["a"].preemptions == 0
    assert driver.done["c"].preemptions > 0
    assert list(driver.done) == ["a", "b", "c", "d"]
    assert driver.engine.scheduler.counters.preemptions == sum(r.preemptions for r in driver.done.values())


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_or_leaked_over_random_arrivals_aborts_pauses_and_swaps(
    model: Path, other: Path, seed: int
) -> None:
    draw = random.Random(seed)
    driver = Driver(
        model, kv_tokens=192, max_batched_tokens=draw.choice([8, 32]), max_num_seqs=6, max_model_len=96
    )
    weights = [driver.engine.load(path) for path in (model, other)]
    added: list[Request] = []
    for _ in range(120):
        what = draw.random()
        if what < 0.3:
            prompt = prompt_of(draw.choice([5, 40]), draw.randrange(2)) + prompt_of(
                draw.randint(1, 9), draw.randrange(99)
            )
            added.append(
                driver.add(f"{len(added)}", prompt, max_tokens=draw.randint(1, 40), seed=draw.randrange(9))
            )
        elif what < 0.4 and added:
            driver.engine.abort({draw.choice(added).id})
        elif what < 0.45:
            paused(driver, draw.choice(["keep", "wait", "abort"]), draw.random() < 0.5)
        elif what < 0.55:
            driver.engine.resume()
        elif what < 0.6:
            driver.engine.swap(draw.choice(weights), f"v{draw.randrange(99)}")
        else:
            driver.run(draw.randint(1, 4))
    driver.engine.resume()
    driver.run()
    assert set(driver.done) == {request.id for request in added}
    assert driver.engine.scheduler.pool.referenced == 0
    assert not driver.engine.scheduler.table.any()
    generated = sum(len(request.output) for request in added)
    assert driver.engine.scheduler.counters.generation_tokens == generated
    for request in added:
        spans = driver.engine.version_spans(request)
        assert [start for _version, start, _end in spans] == [0, *(end for _v, _s, end in spans)][
            : len(spans)
        ]
        assert len(request.output) == len(request.logprobs) == (spans[-1][2] if spans else 0)
