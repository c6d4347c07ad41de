"""`paceline rollouts RUN [ID]`: a table of a run's rollouts, or one of them whole."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec

from paceline.cli.columns import aligned
from paceline.cli.options import positive
from paceline.domain.events import RolloutEnded
from paceline.domain.group import Fate
from paceline.domain.ids import RolloutId, parse_rollout_id
from paceline.domain.rollout import Rollout, Turn
from paceline.errors import ConfigError, printable
from paceline.journal import dropped_before, read_journal, read_rollouts
from paceline.observe.rollouts import RolloutRow, RolloutRows

DROPPED = "journal.keep_token_mb or keep_token_steps has dropped tokens, messages and info"

_SORT = (
    "ended",
    "started",
    "seconds",
    "reward",
    "advantage",
    "sampled_tokens",
    "prompt_tokens",
    "turns",
    "step",
)
_COLUMNS = (
    "rollout",
    "env",
    "task",
    "ending",
    "reward",
    "advantage",
    "fate",
    "step",
    "turns",
    "tokens",
    "versions",
    "s",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path, help="run directory")
    parser.add_argument("id", metavar="ID", nargs="?", help="show this rollout (g12.m3.a0) whole")
    parser.add_argument("--env", help="only of this environment")
    parser.add_argument("--split", choices=["train", "eval"])
    parser.add_argument("--ending", choices=["completed", "truncated", "failed", "cancelled"])
    parser.add_argument("--cause", help="why it failed, was truncated or cancelled")
    parser.add_argument("--fate", choices=get_args(Fate), help="where its tokens went")
    parser.add_argument("--reward", metavar="LOW..HIGH", type=_range, help="either end may be left out")
    parser.add_argument("--step", type=int, metavar="N", help="shipped in batch N")
    parser.add_argument("--group", type=int, metavar="N")
    parser.add_argument("--version", type=int, metavar="N", help="sampled by version N, or across it")
    parser.add_argument("--sort", choices=_SORT, default="ended", help="(default: %(default)s)")
    parser.add_argument("--reverse", action="store_true", help="largest first")
    parser.add_argument("--limit", type=positive, metavar="N", help="only the first N rows")
    parser.add_argument("--tokens", action="store_true", help="with ID: a line for every token")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run(args: argparse.Namespace) -> int:
    rows = RolloutRows()
    since = dropped_before(args.run)
    dropped: set[RolloutId] = set()
    for record in read_journal(args.run):
        rows.apply(record.at, record.event, record.commands)
        if record.seq < since and isinstance(record.event, RolloutEnded):
            dropped.add(record.event.rollout.id)
    if args.id is not None:
        return _show(args, rows, dropped)
    envs = sorted({row.env for row in rows.rows.values()})
    if args.env is not None and envs and args.env not in envs:
        raise ConfigError(
            f"{args.run} has no rollout of an environment {args.env!r}; there are {', '.join(envs)}"
        )
    picked = pick(rows.rows.values(), args)
    if args.json:
        for row in picked:
            print(json.dumps(msgspec.to_builtins(row)))
        return 0
    for line in table(picked):
        print(line)
    print(f"{len(picked)} of {len(rows.rows)} rollouts")
    if dropped:
        print(f"{DROPPED} of the {len(dropped)} that ended first")
    return 0


def pick(rows: Iterable[RolloutRow], args: argparse.Namespace) -> list[RolloutRow]:
    """Filtered, sorted and cut, as the arguments say. Rows without the value that is sorted by come last."""
    low, high = args.reward or (-math.inf, math.inf)
    equal = {
        name: getattr(args, name) for name in ("env", "split", "ending", "cause", "fate", "step", "group")
    }
    wanted = [(name, value) for name, value in equal.items() if value is not None]
    picked = [
        row
        for row in rows
        if all(getattr(row, name) == value for name, value in wanted)
        and (args.reward is None or (row.reward is not None and low <= row.reward <= high))
        and (args.version is None or _sampled_by(row, args.version))
    ]
    valued = [row for row in picked if getattr(row, args.sort) is not None]
    valued.sort(key=lambda row: getattr(row, args.sort), reverse=args.reverse)
    return [*valued, *(row for row in picked if getattr(row, args.sort) is None)][: args.limit]


def _sampled_by(row: RolloutRow, version: int) -> bool:
    if row.oldest_version is None or row.newest_version is None:
        return False
    return row.oldest_version <= version <= row.newest_version


def table(rows: Sequence[RolloutRow]) -> list[str]:
    """Lines of text, escaped."""
    return aligned([_COLUMNS, *[_cells(row) for row in rows]])


def _cells(row: RolloutRow) -> tuple[str, ...]:
    ending = row.ending if row.cause is None else f"{row.ending}:{row.cause}"
    cells = (
        row.rollout,
        row.env if row.split == "train" else f"{row.env} (eval)",
        str(row.task),
        ending,
        "-" if row.reward is None else f"{row.reward:g}",
        "-" if row.advantage is None else f"{row.advantage:+.3g}",
        row.fate or "open",
        "-" if row.step is None else str(row.step),
        str(row.turns),
        f"{row.prompt_tokens}+{row.sampled_tokens}",
        _versions(row.oldest_version, row.newest_version),
        f"{row.seconds:.2f}",
    )
    return tuple([_one_line(cell) for cell in cells])


def _one_line(text: str) -> str:
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def _versions(oldest: int | None, newest: int | None) -> str:
    if oldest is None:
        return "-"
    return f"v{oldest}" if oldest == newest else f"v{oldest}-v{newest}"


# ── one of them ──


def _show(args: argparse.Namespace, rows: RolloutRows, dropped: Collection[RolloutId]) -> int:
    rollout_id = _id_of(args.id)
    if (row := rows.rows.get(rollout_id)) is None:
        raise ConfigError(
            f"{args.run}: no rollout {args.id} has ended; `paceline rollouts {args.run}` lists them"
        )
    found = list(read_rollouts(args.run, [rollout_id]))
    if not found and rollout_id in dropped:
        why = f"{DROPPED} of it"
        told = {**msgspec.to_builtins(row), "dropped": why}
        print(json.dumps(told) if args.json else "\n".join([*head(row), f"tokens   {why}"]))
        return 0
    if not found:
        raise ConfigError(
            f"{args.run}: {args.id} is in the journal, but not in the rollout store: restore its files"
        )
    stored = found[-1]
    if args.json:
        print(json.dumps(whole(row, stored)))
        return 0
    print("\n".join(conversation(row, stored, tokens=args.tokens)))
    return 0


def _id_of(text: str) -> RolloutId:
    try:
        return parse_rollout_id(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is no rollout: give an id such as g12.m3.a0") from error


def conversation(row: RolloutRow, rollout: Rollout, *, tokens: bool) -> list[str]:
    """Lines of text, escaped."""
    lines = head(row, rollout.outcome.detail)
    for number, turn in enumerate(rollout.turns):
        lines.append(_turn_line(number, turn))
        if tokens:
            lines += _token_lines(turn)
    for message in rollout.messages:
        lines += ["", f"[{message.role}]", message.content]
    return [printable(line) for line in lines]


def head(row: RolloutRow, detail: str = "") -> list[str]:
    """What the log tells, as lines of text, escaped."""
    lines = [*table([row]), f"ended    {row.ending}{f': {detail}' if detail else ''}"]
    if row.reason:
        lines.append(f"because  {row.reason}")
    lines.append(
        f"time     {row.started:.2f} s to {row.ended:.2f} s: model {row.model_s:.2f} s, gate {row.gate_s:.2f} s, "
        f"environment {row.env_s:.2f} s"
    )
    return [printable(line) for line in lines]


def _turn_line(number: int, turn: Turn) -> str:
    versions = ", ".join(f"v{version} x {count}" for version, count in turn.versions) or "no version"
    mean = f", mean logprob {float(turn.logprobs.mean()):.3f}" if len(turn.logprobs) else ""
    return (
        f"turn {number}   {len(turn.prompt_ids)} prompt + {len(turn.sampled_ids)} sampled tokens ({versions}){mean}; "
        f"{turn.finish} on {turn.engine or '-'}, {turn.cached_tokens} cached, waited {turn.queued_s:.2f} s, "
        f"ran {turn.ended - turn.started:.2f} s"
    )


def _token_lines(turn: Turn) -> list[str]:
    lines = [f"  {token:>8}  prompt" for token in turn.prompt_ids.tolist()]
    ids, logprobs = turn.sampled_ids.tolist(), turn.logprobs.tolist()
    versions = [version for version, count in turn.versions for _ in range(count)]
    lines += [
        f"  {token:>8}  trainable  {logprob:9.4f}  v{version}"
        for token, logprob, version in zip(ids, logprobs, versions, strict=True)
    ]
    return lines


def whole(row: RolloutRow, rollout: Rollout) -> dict[str, Any]:
    """The row, and everything the store has, as JSON-like values."""
    turns = []
    for turn in rollout.turns:
        told = {f: getattr(turn, f) for f in turn.__struct_fields__}
        for name in ("prompt_ids", "sampled_ids", "logprobs"):
            told[name] = told[name].tolist()
        told["trainable"] = [False] * len(turn.prompt_ids) + [True] * len(turn.sampled_ids)
        turns.append(told)
    return {
        **msgspec.to_builtins(row),
        "detail": rollout.outcome.detail,
        "rewards": rollout.rewards,
        "metrics": rollout.metrics,
        "temperature": rollout.temperature,
        "messages": [msgspec.to_builtins(message) for message in rollout.messages],
        "turn_details": turns,
        "info": msgspec.to_builtins(rollout.info),
    }


def _range(text: str) -> tuple[float, float]:
    low, dots, high = text.partition("..")
    try:
        if not dots:
            return float(text), float(text)
        return float(low or "-inf"), float(high or "inf")
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no range such as 0.5..1, ..0 or 1") from None
