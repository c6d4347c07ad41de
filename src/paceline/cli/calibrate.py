"""`paceline calibrate`: the constants of the engine model, fitted to a recorded run.

paceline calibrate RUN
"""

from __future__ import annotations

import argparse
from pathlib import Path

from paceline.errors import ConfigError
from paceline.journal import read_journal
from paceline.sim.calibrate import calibrate


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory of a finished or live run")


def run(args: argparse.Namespace) -> int:
    if not Path(args.run).is_dir():
        raise ConfigError(f"no run at {args.run!r}: give the directory of a run")
    found = calibrate((r.at, r.event, r.commands) for r in read_journal(Path(args.run)))
    print(f"a step               {1e3 * found.fixed_s:>10.3f} ms")
    print(f"  a sequence in it   {1e6 * found.seq_s:>10.3f} us")
    print(f"  a token of context {1e9 * found.token_s:>10.3f} ns")
    print(f"a prompt token       {1e6 * found.prefill_s:>10.3f} us   if it is not cached")
    print(
        f"error                {found.error:>10.1%}      of a request's seconds, {found.total_error:+.1%} of all, on the "
        f"half of {found.requests} requests that it was not fitted to"
    )
    return 0
