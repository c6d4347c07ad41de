"""Turns that are cut into several requests of a real vLLM, by the real core and runner: token for token as one would be."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm_kit import POLICY, PROMPT, Reference, Server, assert_same, engine_on, request

from paceline.config import BatchSection, Limits, SamplingSection
from paceline.core.admission import Admission, FixedCap
from paceline.core.advantages import builtin
from paceline.core.processing import GroupRules
from paceline.core.scheduler import Core
from paceline.core.setup import CoreSetup
from paceline.domain import commands as do
from paceline.domain import events as on
from paceline.domain.rollout import Rollout
from paceline.engines.http import HttpEngine
from paceline.envs.protocol import Context, EndlessTasks, Environment, Model, Result
from paceline.ports import Published
from paceline.runtime.calls import EnvRuntime
from paceline.runtime.driver import Driver
from paceline.runtime.inbox import Gates, Inbox
from paceline.runtime.loads import poll_load
from paceline.runtime.offload import Inline
from paceline.runtime.processor import EnvProcessing, GroupProcessor
from paceline.runtime.runner import RolloutRunner
from paceline.testing import ScriptedTrainer, setup_for, train_env
from paceline.testing.halving import Halves
from paceline.testing.run import MemoryJournal
from paceline.tokens import Bridge
from paceline.tokens.marks import first_mark
from paceline.tokens.tokenizer import ChatTokenizer

TOKENIZER = ChatTokenizer.load(POLICY)
SEQ_LEN = 512
TOKENS = 300
"""Of an answer. On a fast machine it takes a second, which is a dozen readings."""


class OneCall(Environment):
    """One call with a prompt of ids; what it was answered is kept."""

    def __init__(self) -> None:
        self.said: list[tuple[str, str]] = []

    def tasks(self, split: str) -> EndlessTasks:
        return EndlessTasks(lambda index: index, "one-call")

    async def rollout(self, task: Any, model: Model, ctx: Context) -> Result:
        reply = await model.generate(PROMPT)
        self.said.append((reply.text, reply.finish))
        return Result(reward=float(ctx.rollout.member % 2))


class NoCheckpoints:
    def save(self, step: int, state: dict[str, Any]) -> None:
        pass


class Publishes(ScriptedTrainer):
    """Its versions are real weights."""

    def __init__(self, weights: list[Path]) -> None:
        super().__init__(train_s=lambda _step: 0.1)
        self._weights = weights

    async def next(self) -> Published:
        published = await super().next()
        assert published.version is not None
        return msgspec.structs.replace(published, path=str(self._weights[published.version]))


async def run(
    engine: HttpEngine,
    environment: Environment,
    setup: CoreSetup,
    sampling: SamplingSection,
    admission: Admission,
    weights: list[Path],
) -> MemoryJournal:
    """A run on a real engine and in real time; `weights` by version."""
    loop = asyncio.get_running_loop()
    core, inbox, journal = Core(setup, admission), Inbox(), MemoryJournal()
    gates, trainer = Gates(inbox), Publishes(weights)
    engines = {engine.info.id: engine}
    runtime = EnvRuntime(
        environment, environment.tasks("train"), Limits(deadline_s=200), sampling, Bridge(TOKENIZER)
    )
    driver = Driver(
        core,
        inbox=inbox,
        gates=gates,
        runner=RolloutRunner({("train", "env"): runtime}, engines, gates, loop.time),
        engines=engines,
        processor=GroupProcessor(
            {"env": EnvProcessing(GroupRules(env="env", seq_len=SEQ_LEN), builtin("grpo", {}))}, Inline()
        ),
        sink=trainer,
        policy=trainer,
        journal=journal,
        checkpoints=NoCheckpoints(),
        packing=BatchSection(seq_len=SEQ_LEN),
        offload=Inline(),
    )
    driver.beside("load poll", lambda: poll_load(engine, inbox.post, interval_s=0.05))
    async with asyncio.timeout(240):
        await driver.run(on.RunOpened("test", setup.seed), [on.EngineJoined(engine.info, 0)])
    return journal


def completed(journal: MemoryJournal) -> list[Rollout]:
    ended = [event.rollout for _, event, _ in journal.entries if isinstance(event, on.RolloutEnded)]
    assert not [r.outcome for r in ended if r.outcome.ending == "failed"]
    return [r for r in ended if r.outcome.ending in ("completed", "truncated")]


@pytest.fixture
async def engine(server: Server, weights: list[Path]) -> AsyncIterator[HttpEngine]:
    async with engine_on(server) as engine:
        await engine.update_weights(0, str(weights[0]))
        yield engine


# ---- stop strings

STOPS = (*map("".join, itertools.product("0259", repeat=2)), "<|im_end|>")
"""The policy answers this prompt with digits: before long it says one of these. The last is a special token."""


@pytest.mark.usefixtures("endless")
@pytest.mark.parametrize("budget", [None, 1, 3])
async def test_a_stop_string_ends_a_turn_wherever_its_requests_are_cut(
    engine: HttpEngine, weights: list[Path], references: list[Reference], budget: int | None
) -> None:
    """With one token a request, no request of vLLM ever sees a whole stop string."""
    environment = OneCall()
    setup = setup_for(train_env(group_size=4), batch=8, max_steps=1, seq_len=SEQ_LEN)
    setup = msgspec.structs.replace(setup, segment_tokens=budget)
    sampling = SamplingSection(max_tokens=48, stop=STOPS)
    journal = await run(engine, environment, setup, sampling, FixedCap(8), weights)
    ended = completed(journal)
    stopped = 0
    for rollout in ended:
        (turn,) = rollout.turns
        ids = turn.sampled_ids
        before, text = (TOKENIZER.decode(part, keep_special=True) for part in (ids[:-1], ids))
        assert first_mark(before, STOPS) is None, "its last token completes it, and no token comes behind"
        assert (turn.finish == "stop") is (first_mark(text, STOPS) is not None)
        stopped += turn.finish == "stop"
        if budget == 1:
            assert turn.segments == len(turn.sampled_ids)
        if turn.versions == ((0, len(turn.sampled_ids)),):
            assert_same(turn.logprobs, references[0].logprobs(PROMPT, turn.sampled_ids), usual=0.05)
    assert stopped > len(ended) / 2
    for said, finish in environment.said:
        assert first_mark(said, STOPS) is None
        assert finish in ("stop", "length")


# ---- parking


@pytest.mark.usefixtures("endless")
async def test_parked_rollouts_keep_their_tokens_and_go_on_exactly_also_under_new_weights(
    engine: HttpEngine, weights: list[Path], references: list[Reference]
) -> None:
    setup = setup_for(train_env(group_size=2), batch=4, lag=2, max_steps=2, seq_len=SEQ_LEN)
    journal = await run(engine, OneCall(), setup, SamplingSection(max_tokens=TOKENS), Halves(6), weights)
    commands = [command for _, _, made in journal.entries for command in made]
    parked = {c.rollout for c in commands if isinstance(c, do.ParkRollout)}
    assert len(parked) > 2
    done = completed(journal)
    assert sum(r.turns[0].segments > 1 for r in done) > 2
    assert parked & {r.id for r in done}
    for rollout in done:
        (turn,) = rollout.turns
        assert len(turn.sampled_ids) == TOKENS
        at = 0
        for version, count in turn.versions:
            under = references[version].logprobs(PROMPT, turn.sampled_ids)[at : at + count]
            assert_same(turn.logprobs[at : at + count], under, usual=0.05)
            at += count
        assert at == TOKENS
    # A request that is continued holds every token so far, and nothing twice: what was sampled is in the books once.
    sampled = sum(n for _, e, _ in journal.entries if isinstance(e, on.SegmentEnded) for _, n in e.versions)
    ended = [event.rollout for _, event, _ in journal.entries if isinstance(event, on.RolloutEnded)]
    assert sampled == sum(len(turn.sampled_ids) for r in ended for turn in r.turns)


@pytest.mark.usefixtures("endless")
async def test_a_stop_string_that_is_a_special_token_is_found(engine: HttpEngine) -> None:
    asked = [request(60, temperature=1.5, seed=seed, stop=("<|im_end|>",)) for seed in range(4)]
    replies = await asyncio.gather(*map(engine.generate, asked))
    special = TOKENIZER.encode("<|im_end|>")[0]
    assert any(reply.finish == "stop" for reply in replies)
    for reply in replies:
        assert special not in reply.token_ids[:-1]
        assert (reply.finish == "stop") == (reply.token_ids[-1] == special)
