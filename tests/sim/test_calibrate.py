"""A journal tells what the engine behind it costs, and what surrounded it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from sim_kit import Kept, simulation

from paceline.cli.main import main
from paceline.core.admission import FixedCap
from paceline.core.streams import key, uniform
from paceline.domain import events as on
from paceline.domain.commands import GrantTurn, StartRollout
from paceline.domain.ids import RolloutId
from paceline.errors import ConfigError
from paceline.journal import FileJournal
from paceline.sim.calibrate import Calibration, calibrate, recorded_engines, sums_of
from paceline.sim.engine import Speed
from paceline.sim.plan import RolloutPlan
from paceline.sim.recorded_world import recorded_world
from paceline.sim.requests import Record, Stretch
from paceline.sim.world import TrainerModel, WeightsModel

TRUTH = Speed(kv_tokens=400_000, max_model_len=40_000, kv_s=3e-7)


def recorded(
    preset: str = "search",
    *,
    speed: Speed = TRUTH,
    cap: int = 24,
    load_s: float = 2.0,
    steps: int = 3,
    batch: int = 64,
) -> list[Record]:
    kept = Kept()
    simulation(
        preset,
        engines=1,
        speed=speed,
        admission=FixedCap(cap),
        trainer=TrainerModel(step_s=5.0, tokens_per_s=20_000.0, ship_s=1.5, publish_s=0.5),
        weights=WeightsModel(load_s=load_s),
        batch=batch,
        max_steps=steps,
        folds=[kept],
    ).run()
    return list(kept.entries)


def step_s(found: Calibration, batch: int, context: int) -> float:
    return found.fixed_s + batch * found.seq_s + batch * context * found.context_s


def test_a_simulated_run_gives_its_engines_constants_back() -> None:
    found = calibrate(recorded())
    assert found.requests > 500
    assert found.error < 0.2
    assert abs(found.total_error) < 0.05
    assert not found.pads
    truth = TRUTH.decode_s(12) + 12 * 5000 * TRUTH.kv_s
    assert step_s(found, 12, 5000) == pytest.approx(truth, rel=0.15)


def test_an_engine_that_pads_is_told_from_one_that_does_not() -> None:
    found = calibrate(recorded(speed=msgspec.structs.replace(TRUTH, pads=True)))
    assert found.pads
    assert found.error < 0.2
    assert abs(found.total_error) < 0.05
    assert step_s(found, 12, 5000) == pytest.approx(TRUTH.decode_s(12) + 12 * 5000 * TRUTH.kv_s, rel=0.15)
    assert found.speed(kv_tokens=1, max_model_len=1).pads


def test_time_in_which_an_engine_loads_weights_is_none_of_its_requests() -> None:
    quick, slow = calibrate(recorded(load_s=0.0)), calibrate(recorded(load_s=60.0))
    assert slow.error < 0.2
    assert step_s(slow, 12, 5000) == pytest.approx(step_s(quick, 12, 5000), rel=0.1)


def test_what_a_request_costs_beside_its_tokens_is_told_from_them() -> None:
    """Short answers pay for it again and again, long ones hardly: without it, one would be mistaken about the other."""
    speed = msgspec.structs.replace(TRUTH, request_s=0.02)
    found = calibrate([*recorded("math-tool", speed=speed), *recorded("search", speed=speed, cap=6)])
    assert found.request_s == pytest.approx(0.02, rel=0.5)
    assert abs(found.total_error) < 0.05


class Answers:
    """Answers to a prompt that a group shares, of `answer` tokens on the mean; 150 tokens are observed between two."""

    def __init__(self, prompt: int, answer: int, turns: int) -> None:
        self.prompt, self.answer, self.turns = prompt, answer, turns
        self.longest = prompt + turns * (2 * answer + 150)

    def plan(self, command: StartRollout, now: float) -> RolloutPlan:
        base = key(1, *command.rollout)
        turns = [
            (0.0, 150 if turn else 0, 1 + int(2 * self.answer * uniform(base, turn)))
            for turn in range(self.turns)
        ]
        return RolloutPlan(prompt=self.prompt, turns=tuple(turns))


@pytest.mark.parametrize(("pads", "again"), [(False, 1.0), (True, 1.0), (False, 0.1)])
def test_loads_that_span_tell_steps_and_prompts_of_every_size(pads: bool, again: float) -> None:
    """Few and many at a time, short and long prompts, short and long answers: `docs/simulator.md` names them. Answers wait for steps
    that are under way and for prompts of others, which may not be taken for what a request or a token costs."""
    small = Speed(
        kv_tokens=40_000,
        max_model_len=4000,
        max_batched_tokens=512 if pads else 4000,
        weights_s=0.0,
        token_s=2e-4,
        kv_s=2e-6,
        kv_again=again,
        pads=pads,
        attention_s=1.5e-7,
        overhead_s=8e-3,
        seq_s=3e-4,
        request_s=4e-3,
    )
    loads = [
        (60, 150, 2),
        (60, 30, 64),
        (60, 200, 32),
        (600, 30, 12),
        (3000, 10, 1),
        (2500, 150, 4),
        (300, 40, 6),
        (500, 100, 16),
    ]
    records: list[Record] = []
    for prompt, answer, cap in loads:
        kept = Kept()
        simulation(
            workload=Answers(prompt, answer, turns=6 if cap == 6 else 1),
            engines=1,
            speed=small,
            admission=FixedCap(cap),
            batch=10**6,
            folds=[kept],
        ).run(until=40.0)
        records += kept.entries
    found = calibrate(records, small.max_batched_tokens)
    assert found.pads is pads
    assert abs(found.total_error) < 0.05
    assert found.fixed_s == pytest.approx(small.overhead_s, rel=0.1)
    assert found.again_s / found.context_s == pytest.approx(again, abs=0.15)
    assert found.speed(kv_tokens=1, max_model_len=1).kv_again == pytest.approx(again, abs=0.15)
    for batch, context in [(2, 150), (4, 2500), (32, 200), (64, 80)]:
        truth = small.decode_s(batch) + batch * context * small.kv_s
        assert step_s(found, batch, context) == pytest.approx(truth, rel=0.1)
    for prompt in (60, 600, 2500):
        assert _prompt_s(found.token_s, found.attention_s, found.request_s, prompt) == pytest.approx(
            _prompt_s(small.token_s, small.attention_s, small.request_s, prompt), rel=0.2
        )


def _prompt_s(token_s: float, attention_s: float, request_s: float, tokens: int) -> float:
    return tokens * (token_s + tokens / 2 * attention_s) + request_s


def test_a_second_run_begins_anew() -> None:
    """Requests that the end of a run cut off are none of the next one's, whose rollouts have the same names."""
    whole = recorded()
    cut = whole[: len(whole) // 2]
    found = calibrate([*cut, *whole])
    assert found.requests == calibrate(cut).requests + calibrate(whole).requests
    assert found.error < 0.2


def test_the_trainer_and_the_weights_of_a_run_are_told() -> None:
    found = recorded_world(recorded(steps=8, load_s=3.0))
    tokens = 100_000
    assert found.trainer.step_s + tokens / (found.trainer.tokens_per_s or 1.0) == pytest.approx(10.0, rel=0.1)
    assert found.trainer.ship_s == pytest.approx(1.5)
    assert found.trainer.publish_s == pytest.approx(0.5)
    assert found.weights.load_s == pytest.approx(3.0, rel=0.1)


def test_runs_with_other_batches_tell_a_step_of_the_trainer_from_its_tokens() -> None:
    found = recorded_world([*recorded(steps=4), *recorded(steps=4, batch=16)])
    assert found.trainer.step_s == pytest.approx(5.0, rel=0.1)
    assert found.trainer.tokens_per_s == pytest.approx(20_000.0, rel=0.1)
    assert found.trainer.publish_s == pytest.approx(0.5)


def test_a_trainer_that_publishes_before_it_acknowledges_is_told_the_same() -> None:
    """The reference trainer does: the word of its step comes with its weights, or behind them."""
    held: on.StepTrained | None = None
    records: list[Record] = []
    for at, event, commands in [*recorded(steps=4), *recorded(steps=4, batch=16)]:
        if isinstance(event, on.StepTrained):
            held = msgspec.structs.replace(event, metrics={"publish_s": 0.5})
            continue
        records.append((at, event, commands))
        if isinstance(event, on.PolicyPublished) and held is not None:
            records.append((at, held, ()))
    found = recorded_world(records).trainer
    assert found.publish_s == pytest.approx(0.5)
    assert found.step_s == pytest.approx(5.0, rel=0.1)
    assert found.tokens_per_s == pytest.approx(20_000.0, rel=0.1)


def one_by_one(seconds: list[float]) -> list[Record]:
    """Requests of ten tokens, each asked for when the one before is over; no engine says that it is there."""
    records: list[Record] = []
    at = 0.0
    for group, took in enumerate(seconds):
        rollout = RolloutId(group, 0)
        records.append((at, on.TurnRequested(rollout, 0, 10), (GrantTurn(rollout, "e0", 0),)))
        at += took
        records.append((at, on.SegmentEnded(rollout, "e0", ((0, 10),), "stop"), ()))
    return records


def test_the_error_of_a_request_is_of_those_that_were_not_fitted_to() -> None:
    """The first request is a sum, then two are, and every other sum is fitted. Two take two seconds, and in some both as long."""
    even, uneven = [1.0, 1.0], [0.5, 1.5]

    def error(fitted: list[float], others: list[float]) -> float:
        return calibrate(one_by_one([1.0, *(others + fitted) * 15, *others, 1.0])).error

    assert error(fitted=uneven, others=even) == pytest.approx(0.0, abs=1e-6)
    # With the last one, which is as it was told.
    assert error(fitted=even, others=uneven) == pytest.approx(16 / 33 * ((1 / 0.5 - 1) + (1 - 1 / 1.5)))


def test_the_last_stretch_makes_no_sum_by_itself() -> None:
    one = Stretch(1.0, 10.0, 10.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    for number, sums in [(40, 24), (48, 24), (64, 32), (65, 33)]:
        assert len(set(sums_of([one] * number).tolist())) == sums
    assert sums_of([one] * 64).tolist()[-4:] == [30, 31, 31, 31]


def test_a_journal_with_too_little_in_it_is_refused() -> None:
    with pytest.raises(ConfigError, match="holds 0 whole engine requests"):
        calibrate([])
    with pytest.raises(ConfigError, match="holds 0 trained steps that count"):
        recorded_world(recorded(steps=1))
    with pytest.raises(ConfigError, match="holds 128 records, and no engine joins in them"):
        recorded_engines(one_by_one([1.0] * 64))


def write(run: Path, records: list[Record]) -> None:
    async def append() -> None:
        journal = FileJournal(run, "run")
        for record in records:
            journal.append(*record)
        await journal.close()

    asyncio.run(append())


@pytest.mark.parametrize(
    ("share", "error"),
    [
        (0.0, "holds 0 whole engine requests"),
        (0.5, "holds 0 whole engine requests"),
        (None, "holds no journal"),
    ],
)
def test_a_run_without_a_whole_journal_is_one_error(
    share: float | None, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "run", one_by_one([1.0] * 64))
    (log,) = (tmp_path / "run").rglob("*.log")
    if share is None:
        log.unlink()
    else:
        log.write_bytes(log.read_bytes()[: int(share * log.stat().st_size)])
    assert main(["calibrate", str(tmp_path / "run")]) != 0
    told = capsys.readouterr()
    assert error in told.err
    assert told.err.count("error: ") == 1
    assert not told.out


def test_the_command_line_prints_the_engine_and_the_rest_of_a_study(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "long", recorded(steps=6))
    write(tmp_path / "short", recorded(steps=1))
    assert main(["calibrate", str(tmp_path / "long"), str(tmp_path / "short")]) == 0
    said = capsys.readouterr().out
    assert "a sequence in it" in said
    assert "tokens_per_s = " in said
    assert main(["calibrate", str(tmp_path / "short")]) == 0
    assert "to tell what one costs takes 3" in capsys.readouterr().out
    write(tmp_path / "even", one_by_one([1.0] * 64))
    assert main(["calibrate", str(tmp_path / "even")]) == 0
    (untold,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("not told")]
    assert "a token before it" in untold
    assert main(["calibrate", "--max-batched-tokens", "0", str(tmp_path / "short")]) != 0
    assert "'0' is no whole number of at least 1" in capsys.readouterr().err
    assert main(["calibrate", str(tmp_path / "nowhere")]) != 0
    assert "no run at" in capsys.readouterr().err
