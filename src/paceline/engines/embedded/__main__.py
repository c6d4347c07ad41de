"""`python -m paceline.engines.embedded --model DIR`: serve one model until SIGTERM, or until the parent dies."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import ipaddress
import os
import signal
import sys
import threading
from pathlib import Path

TOKEN_VARIABLE = "PACELINE_ENGINE_TOKEN"
PR_SET_PDEATHSIG = 1


def exit_with_parent() -> None:
    """Linux: end when the process that started this one dies, however it dies.

    The kernel sends the signal when the *thread* that started us ends; then our parent is unchanged, and
    we go on. SIGUSR1, because SIGTERM would not tell the two apart.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()

    def orphaned(_signal: int, _frame: object) -> None:
        if os.getppid() != parent:
            os._exit(0)

    signal.signal(signal.SIGUSR1, orphaned)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGUSR1)


def watch_stdin() -> None:
    """End when stdin does: the other end of the pipe was closed, or its owner is gone."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin", daemon=True).start()


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m paceline.engines.embedded", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add(
        "--model",
        type=Path,
        required=True,
        help="Hugging Face directory: config.json, *.safetensors, tokenizer.json",
    )
    add("--host", default="127.0.0.1", help="any but loopback needs a token")
    add("--port", type=int, default=0, help="0 takes a free one and prints it")
    add(
        "--token",
        default=os.environ.get(TOKEN_VARIABLE),
        help=f"Bearer token that requests need; also {TOKEN_VARIABLE}",
    )
    add("--kv-tokens", type=int, default=65536, help="capacity of the KV cache, in tokens")
    add("--block-size", type=int, default=16, help="tokens in a block, the unit of prefix sharing")
    add("--max-num-seqs", type=int, default=64, help="sequences computed at the same time; the others wait")
    add(
        "--max-batched-tokens",
        type=int,
        default=512,
        help="tokens computed in one step; longer prompts go in chunks",
    )
    add("--max-model-len", type=int, help="prompt plus output; unset, what model and cache allow")
    add(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of weights, KV cache and arithmetic",
    )
    add("--seed", type=int, default=0, help="of requests that bring none")
    add("--served-model-name", default="policy", help="the name that requests may ask for")
    add("--weight-version", default="default", help="label of the weights it starts with")
    add("--exit-with-stdin", action="store_true", help="end when stdin is closed")
    add(
        "--exit-with-parent",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end when the parent process dies",
    )
    return parser


def main() -> int:
    options = arguments().parse_args()
    if (
        options.host != "localhost"
        and not ipaddress.ip_address(options.host).is_loopback
        and not options.token
    ):
        print(
            f"error: host {options.host} is not loopback, so requests need a token: set {TOKEN_VARIABLE}",
            file=sys.stderr,
        )
        return 2
    if options.exit_with_parent:
        exit_with_parent()
    if options.exit_with_stdin:
        watch_stdin()
    # Before torch is imported: with more threads, the barriers of shared cores cost more than the work.
    os.environ["OMP_NUM_THREADS"] = "1"
    from paceline.engines.embedded.engine import EngineConfig
    from paceline.engines.embedded.server import serve
    from paceline.errors import PacelineError

    try:
        config = EngineConfig(
            model=options.model,
            kv_tokens=options.kv_tokens,
            block_size=options.block_size,
            max_num_seqs=options.max_num_seqs,
            max_batched_tokens=options.max_batched_tokens,
            max_model_len=options.max_model_len,
            dtype=options.dtype,
            seed=options.seed,
            weight_version=options.weight_version,
        )
        asyncio.run(serve(config, options.host, options.port, options.served_model_name, options.token))
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
