"""`python -m paceline.engines.embedded --model DIR`: serve one model until SIGTERM, or until the parent dies."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import threading
from dataclasses import fields
from pathlib import Path

from paceline.engines.embedded.options import TOKEN_VARIABLE, EngineOptions
from paceline.errors import ConfigError, WireError, printable

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def exit_with_parent() -> None:
    """Linux: end when the process that started this one dies, however it dies.

    The kernel also signals when only the *thread* that started us ends. Then our parent is unchanged, and
    we go on. SIGUSR1, because a SIGTERM from the kernel looks like any other.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()

    def orphaned(_signal: int, _frame: object) -> None:
        if os.getppid() != parent:
            os._exit(0)

    signal.signal(signal.SIGUSR1, orphaned)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)


def exit_with_stdin() -> None:
    """End when the other end of the pipe is closed, or its owner is gone."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin", daemon=True).start()


def main() -> int:
    parser = EngineOptions.parser()
    add_arguments(parser)
    return run(parser.parse_args())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How the process ends; the engine's own options are in `EngineOptions`."""
    parser.add_argument("--token-file", type=Path, help="file that holds the Bearer token, and nothing else")
    parser.add_argument("--exit-with-stdin", action="store_true", help="end when stdin is closed")
    stays = argparse.BooleanOptionalAction
    parser.add_argument(
        "--exit-with-parent", action=stays, default=True, help="end when the parent process dies"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns the exit code."""
    given = {f.name: getattr(args, f.name) for f in fields(EngineOptions)}
    if args.exit_with_parent:
        exit_with_parent()
    if args.exit_with_stdin:
        exit_with_stdin()
    try:
        # Not as the option's default, which --help would print.
        token = given["token"] or os.environ.get(TOKEN_VARIABLE)
        if args.token_file is not None:
            token = args.token_file.read_text().strip()
            if not token:
                raise ConfigError(f"--token-file {args.token_file} is empty: it must hold the token")
        options = EngineOptions(**{**given, "token": token})
        # Before torch is imported: with more threads, the barriers of shared cores cost more than the work.
        os.environ["OMP_NUM_THREADS"] = "1"
        from paceline.engines.embedded.server import serve

        asyncio.run(serve(options))
    except (ConfigError, WireError, OSError) as error:
        print(f"error: {printable(str(error))}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
