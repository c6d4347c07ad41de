"""A rollout's turns become the flat, token-exact samples a trainer learns from.

A turn that extends what came before goes on in its sample; a turn that does not begins a new one. One that goes on
from a turn in the middle of a sample begins a new one too, which carries what comes before as context: ids are taken
as the engine sampled them and never encoded again, and every sampled id is trainable in exactly one sample.
A record whose parts do not fit together is refused as a whole: padding a missing logprob with 0 would train on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from paceline.domain.rollout import Ending, FailureCause, Rollout, Turn, VersionRuns
from paceline.domain.sample import Sample
from paceline.errors import InvariantError, PacelineError

HIGHEST_LOGPROB = 1e-3
"""Rounding (in bfloat16) may lift the logprob of a certain token a little above 0; more than this is no probability. Clients of engines
and the trainer go by the same."""

LOWEST_LOGPROB = -9999.0
"""Engines write -9999.0 where they mean minus infinity, because JSON has no word for it."""

_MAX_ID = 2**31 - 1
_INT32 = np.dtype(np.int32)
_FLOAT32 = np.dtype(np.float32)


class RecordRefused(PacelineError):
    """A rollout's record cannot be trained on. It becomes a failed rollout; its siblings go on."""

    def __init__(self, cause: FailureCause, text: str) -> None:
        super().__init__(text)
        self.cause: FailureCause = cause
        """`empty` when nothing was sampled, else `data`."""


class Built(msgspec.Struct, frozen=True, gc=False):
    """What a rollout's record became."""

    samples: tuple[Sample, ...]
    """Those with at least one trainable token, in order; empty when the rollout is `overlong`."""
    ending: Ending
    """The rollout's own, or `truncated` when a sample was cut."""
    generated_tokens: int
    """Sampled tokens of the record, before any cut."""
    prefix_breaks: int = 0
    """Turns after the first that did not go on in a sample that was there."""
    cut_tokens: int = 0
    """Sampled tokens that were cut off, those of samples that vanished included."""
    overlong: str = ""
    """Why nothing ships although the record is sound; empty when something does."""


def build_samples(rollout: Rollout, *, seq_len: int, overlong: Literal["cut", "drop"]) -> Built:
    """The samples of a scored rollout, with advantage 0. RecordRefused when the record is not sound.

    With `cut`, what lies beyond `seq_len` tokens is cut off every sample, and the ending becomes truncated. With
    `drop`, one sample that is too long keeps the whole rollout from training.
    """
    rewards = rollout.turn_rewards
    if rewards is not None and (len(rewards) != len(rollout.turns) or not all(map(math.isfinite, rewards))):
        raise RecordRefused(
            "data", f"turn_rewards are {rewards}, for {len(rollout.turns)} turns: one finite number a turn"
        )
    turns = [_sound(number, turn) for number, turn in enumerate(rollout.turns)]
    generated = sum([len(turn.sampled_ids) for turn in turns])
    if not generated:
        raise RecordRefused("empty", f"{len(turns)} turns sampled no token")
    chains = _chains(turns)
    built = [_flat(rollout, turns, chain, context) for chain, context in chains]
    longest = max([sample.tokens for sample in built])
    ending, cut_tokens, why = rollout.outcome.ending, 0, ""
    if longest > seq_len:
        if overlong == "drop":
            why = f"a sample of {longest} tokens is longer than batch.seq_len {seq_len}"
            built = []
        else:
            ending = "truncated"
            whole, built = built, [cut_sample(sample, seq_len) for sample in built]
            cut_tokens = sum([sample.cut_tokens for sample in built])
            if cut_tokens == generated:
                first = min(int(np.argmax(sample.trainable)) for sample in whole)
                why = f"the prompt has {first} tokens, batch.seq_len is {seq_len}: no sampled token lies within it"
    return Built(
        samples=tuple([sample for sample in built if sample.versions]),
        ending=ending,
        generated_tokens=generated,
        prefix_breaks=len(chains) - 1,
        cut_tokens=cut_tokens,
        overlong=why,
    )


def turns_of_tokens(rollout: Rollout, samples: Sequence[Sample]) -> tuple[NDArray[np.int32], ...]:
    """For each sample that `build_samples` made of `rollout`, int32[T]: which turn sampled the token, -1 for none."""
    return tuple([marks for _, _, marks in _found(rollout, samples)])


def chains_of(rollout: Rollout, samples: Sequence[Sample]) -> list[tuple[list[int], int]]:
    """For each sample that `build_samples` made of `rollout`: its turns in order, and how many of them are context
    that trains in an earlier sample."""
    return [(chain, context) for chain, context, _ in _found(rollout, samples)]


def _found(rollout: Rollout, samples: Sequence[Sample]) -> list[tuple[list[int], int, NDArray[np.int32]]]:
    """For each sample its chain, how much of that is context, and which turn sampled each of its tokens."""
    # A sample that was cut is the beginning of its whole; one that trains nothing has vanished.
    found: list[tuple[list[int], int, NDArray[np.int32]]] = []
    left = iter(_chains(rollout.turns))
    for sample in samples:
        for chain, context in left:
            marks = _marks(rollout.turns, chain, context)[: sample.tokens]
            if len(marks) == sample.tokens and np.array_equal(marks >= 0, sample.trainable):
                found.append((chain, context, marks))
                break
        else:
            raise InvariantError(f"a sample of {sample.rollout} is not made of the turns of {rollout.id}")
    return found


def _marks(turns: Sequence[Turn], chain: Sequence[int], context: int) -> NDArray[np.int32]:
    """Which turn sampled each token of a chain, -1 for none that trains in it."""
    parts: list[NDArray[np.int32]] = []
    for place, number in enumerate(chain):
        parts.append(np.full(len(turns[number].prompt_ids), -1, np.int32))
        mark = -1 if place < context else number  # context trains in an earlier sample
        parts.append(np.full(len(turns[number].sampled_ids), mark, np.int32))
    return np.concatenate(parts)


def _chains(turns: Sequence[Turn]) -> list[tuple[list[int], int]]:
    """The turns of each sample in order, and how many of them are context that trains in an earlier sample."""
    chains: list[tuple[list[int], int]] = []
    of: list[int] = []  # the chain that a turn trains in
    for number, turn in enumerate(turns):
        if not turn.extends or not number:
            chains.append(([number], 0))
        else:
            before = number - 1 if turn.after < 0 else turn.after
            if before >= number:
                raise RecordRefused(
                    "data", f"turn {number + 1} goes on from turn {before + 1}, which comes later"
                )
            chain = chains[of[before]][0]
            if chain[-1] == before:
                chain.append(number)
                of.append(of[before])
                continue
            context = chain[: chain.index(before) + 1]
            chains.append(([*context, number], len(context)))
        of.append(len(chains) - 1)
    return chains


def _flat(rollout: Rollout, turns: Sequence[Turn], chain: Sequence[int], context: int) -> Sample:
    """One sample of the turns of `chain`; the first `context` of them do not train."""
    parts: list[NDArray[np.int32]] = []
    spans: list[tuple[int, int]] = []
    at = 0
    for number in chain:
        turn = turns[number]
        parts += (turn.prompt_ids, turn.sampled_ids)
        start = at + len(turn.prompt_ids)
        at = start + len(turn.sampled_ids)
        spans.append((start, at))
    token_ids = np.concatenate(parts)
    trainable = np.zeros(at, np.bool_)
    logprobs = np.zeros(at, np.float32)
    trains = chain[context:]
    for number, (start, end) in zip(trains, spans[context:], strict=True):
        trainable[start:end] = True
        logprobs[start:end] = turns[number].logprobs
    if not at or trainable[0]:
        raise RecordRefused(
            "data", f"turn {chain[0] + 1} has an empty prompt: nothing precedes its first sampled token"
        )
    _check_values(turns, chain, token_ids, logprobs)
    for array in (token_ids, trainable, logprobs):
        array.setflags(write=False)
    return Sample(
        token_ids=token_ids,
        trainable=trainable,
        logprobs=logprobs,
        versions=turns[trains[0]].versions if len(trains) == 1 else join_runs([turns[n] for n in trains]),
        rollout=rollout.id,
        env=rollout.task.env,
        task_index=rollout.task.index,
        ending=rollout.outcome.ending,
        reward=0.0 if rollout.reward is None else float(rollout.reward),
        temperature=rollout.temperature,
    )


def cut_sample(sample: Sample, seq_len: int) -> Sample:
    """The first `seq_len` tokens of a sample, or all of it; either way of a truncated rollout."""
    if sample.tokens <= seq_len:
        return msgspec.structs.replace(sample, ending="truncated")
    cut_tokens = int(np.count_nonzero(sample.trainable[seq_len:]))
    # Copies, not views: a view would keep what was cut in memory until the batch has shipped.
    token_ids, trainable, logprobs = (
        array[:seq_len].copy() for array in (sample.token_ids, sample.trainable, sample.logprobs)
    )
    for array in (token_ids, trainable, logprobs):
        array.setflags(write=False)
    return msgspec.structs.replace(
        sample,
        token_ids=token_ids,
        trainable=trainable,
        logprobs=logprobs,
        versions=first_runs(sample.versions, sample.trainable_tokens - cut_tokens),
        ending="truncated",
        cut_tokens=cut_tokens,
    )


def join_runs(turns: Sequence[Turn]) -> VersionRuns:
    """The versions of all sampled tokens of turns that follow each other."""
    runs: list[tuple[int, int]] = []
    for turn in turns:
        for version, count in turn.versions:
            if runs and runs[-1][0] == version:
                runs[-1] = (version, runs[-1][1] + count)
            else:
                runs.append((version, count))
    return tuple(runs)


def first_runs(runs: VersionRuns, tokens: int) -> VersionRuns:
    """The versions of the first `tokens` tokens."""
    kept: list[tuple[int, int]] = []
    for version, count in runs:
        if tokens <= 0:
            break
        kept.append((version, min(count, tokens)))
        tokens -= count
    return tuple(kept)


def _sound(number: int, turn: Turn) -> Turn:
    """The turn, its arrays int32 and float32 of equal length and its version runs without empty ones."""
    if not (
        _is_flat(turn.prompt_ids, _INT32)
        and _is_flat(turn.sampled_ids, _INT32)
        and _is_flat(turn.logprobs, _FLOAT32)
    ):
        turn = _as_arrays(number, turn)
    sampled, logprobs = turn.sampled_ids, turn.logprobs
    if len(sampled) != len(logprobs):
        raise RecordRefused(
            "data",
            f"turn {number + 1} has {len(sampled)} sampled ids and {len(logprobs)} logprobs",
        )
    versions = turn.versions
    stamped = 0
    for version, count in versions:
        if version < 0 or count < 0:
            raise RecordRefused("data", f"turn {number + 1} has the version run ({version}, {count})")
        stamped += count
    if stamped != len(sampled):
        raise RecordRefused(
            "data",
            f"turn {number + 1} has {len(sampled)} sampled ids, but its version runs add up to {stamped}",
        )
    if len(versions) > 1 or not stamped:
        clean = join_runs([turn]) if all(n for _, n in versions) else tuple(run for run in versions if run[1])
        if clean != versions:
            turn = msgspec.structs.replace(turn, versions=clean)
    return turn


def _is_flat(value: Any, dtype: np.dtype[Any]) -> bool:
    return type(value) is np.ndarray and value.dtype == dtype and value.ndim == 1


def _as_arrays(number: int, turn: Turn) -> Turn:
    """For records that an environment's own code made: lists, other dtypes, or nothing at all."""
    ids: dict[str, NDArray[Any]] = {}
    for name in ("prompt_ids", "sampled_ids"):
        value: Any = getattr(turn, name)
        array = np.asarray([] if value is None else value)
        if array.size == 0:
            array = array.astype(np.int32)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise RecordRefused("data", f"turn {number + 1}: {name} is not a flat list of token ids")
        if array.size and int(array.max()) > _MAX_ID:
            raise RecordRefused(
                "data", f"turn {number + 1}: {name} holds {int(array.max())}, more than int32"
            )
        ids[name] = array.astype(np.int32)
    given: Any = turn.logprobs
    if given is None:
        raise RecordRefused("data", f"turn {number + 1} has no logprobs for {len(ids['sampled_ids'])} ids")
    try:
        with np.errstate(over="ignore"):  # what overflows becomes infinite, and is refused by value
            logprobs = np.asarray(given, np.float64).astype(np.float32)
    except (TypeError, ValueError) as error:
        raise RecordRefused("data", f"turn {number + 1}: logprobs are not numbers ({error})") from None
    if logprobs.ndim != 1:
        raise RecordRefused("data", f"turn {number + 1}: logprobs have {logprobs.ndim} dimensions, not 1")
    return msgspec.structs.replace(turn, **ids, logprobs=logprobs)


def are_possible(logprobs: NDArray[np.float32]) -> bool:
    """Whether all can be logprobs of sampled tokens; false with a NaN. float32[T], T at least 1."""
    # `argmin` finds a NaN, for which comparisons are false, and costs a third of what `min` does on short arrays.
    return bool(
        logprobs[logprobs.argmin()] > LOWEST_LOGPROB and logprobs[logprobs.argmax()] <= HIGHEST_LOGPROB
    )


def impossible(logprobs: NDArray[np.float32]) -> NDArray[np.bool_]:
    """bool[T]: which of them cannot be the logprob of a sampled token."""
    return ~((logprobs > LOWEST_LOGPROB) & (logprobs <= HIGHEST_LOGPROB))


def _check_values(
    turns: Sequence[Turn], chain: Sequence[int], token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> None:
    """Three extremes a sample on the way that all take; the place of a fault is looked up only when there is one."""
    if are_possible(logprobs) and token_ids[token_ids.argmin()] >= 0:
        return
    for number in chain:
        turn = turns[number]
        wrong = impossible(turn.logprobs)
        if wrong.any():
            place = int(wrong.argmax())
            raise RecordRefused(
                "data",
                f"turn {number + 1}, sampled token {place}: logprob {float(turn.logprobs[place]):g} is not that of "
                "a token that can be sampled",
            )
        for name, ids in (("prompt", turn.prompt_ids), ("sampled", turn.sampled_ids)):
            if (ids < 0).any():
                place = int((ids < 0).argmax())
                raise RecordRefused(
                    "data", f"turn {number + 1}, {name} token {place}: id {ids[place]} is negative"
                )
