"""`paceline calibrate`: the constants of the engine model, fitted to recorded runs, and what surrounded the engines.

paceline calibrate [--max-batched-tokens N] RUN [RUN ...]
"""

from __future__ import annotations

import argparse

from paceline.cli.options import positive
from paceline.cli.studies import check_run, distinct, records_of
from paceline.errors import ConfigError
from paceline.sim.calibrate import Calibration, calibrate
from paceline.sim.recorded_world import RecordedWorld, recorded_world


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="directory of a finished or live run; several, with the same engines under other loads, tell more than one",
    )
    parser.add_argument(
        "--max-batched-tokens",
        type=positive,
        default=8192,
        help="most tokens of one step of the engines: a longer prompt took several (default: %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    runs = distinct(args.runs)
    for each in runs:
        check_run(each)
    _show_engines(calibrate(records_of(*runs), args.max_batched_tokens))
    try:
        world = recorded_world(records_of(*runs))
    except ConfigError as error:
        print(f"\nthe trainer: {error}")
    else:
        _show_world(world)
    return 0


def _show_engines(found: Calibration) -> None:
    print(f"a step               {1e3 * found.fixed_s:>10.3f} ms")
    print(f"  a sequence in it   {1e6 * found.seq_s:>10.3f} us")
    padded = "   as many for each sequence as the longest has" if found.pads else ""
    print(f"  a token of context {1e9 * found.context_s:>10.3f} ns{padded}")
    if not found.pads:
        print(
            f"    read again       {1e9 * found.again_s:>10.3f} ns   by a sequence of the same step that shares it"
        )
    print(f"a prompt token       {1e6 * found.token_s:>10.3f} us   if it is not cached")
    print(f"  a token before it  {1e9 * found.attention_s:>10.3f} ns")
    print(f"a request            {1e3 * found.request_s:>10.3f} ms   to take it in and answer it")
    if untold := found.untold:
        print(
            f"not told             {', '.join(untold)}: these loads cannot tell it from the rest, and others would come out "
            "wrong; docs/simulator.md names loads that do"
        )
    print(
        f"error                {found.total_error:>+10.1%}      of the half of the seconds that it was not fitted to; "
        f"{found.error:.1%} of a request that ends in it, on the mean ({found.requests} requests in all)"
    )


def _show_world(found: RecordedWorld) -> None:
    """As a study has it."""
    trainer, weights = found.trainer, found.weights
    print("\nthe rest, for a study:\n\n[trainer]")
    print(f"step_s = {trainer.step_s:.4g}")
    if trainer.tokens_per_s is not None:
        print(f"tokens_per_s = {trainer.tokens_per_s:.4g}")
    print(f"ship_s = {trainer.ship_s:.4g}\npublish_s = {trainer.publish_s:.4g}")
    print(f'\n[weights]\nmode = "{weights.mode}"\nload_s = {weights.load_s:.4g}')
