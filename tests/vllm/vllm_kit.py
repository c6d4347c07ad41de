"""What the tests against a real vLLM share: a server, a client on it, and a plain forward pass to compare with."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.engines.http import HttpEngine, Limits, connect
from paceline.ports import GenerateReply, GenerateRequest, SamplingParams
from paceline.runtime import parent

ROOT = Path(__file__).parents[2]
POLICY = ROOT / "src" / "paceline" / "assets" / "small_policy"
VLLM = os.environ.get("PACELINE_VLLM", "")
"""The Python of its environment; `make test-vllm` sets it."""
URL = os.environ.get("PACELINE_VLLM_URL", "")
"""A server that runs already."""
START_S = 240.0
LIMITS = Limits(request_s=120.0, admin_s=30.0, load_weights_s=60.0, metrics_s=10.0)
PROMPT = np.array([256, 65, 66, 67, 32, 70, 71, 72, 80] * 10, np.int32)
_names = itertools.count()

WORST, USUAL = 0.3, 0.02
"""Largest and mean difference of a logprob, vLLM in bfloat16 against float32 here: measured 0.16 (of an unlikely
token) and 0.006."""


# ---- the server


@dataclass(frozen=True)
class Server:
    url: str
    pid: int
    """Also its process group; 0 when it is somebody else's."""
    log: Path

    def kill(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(log: Path, *options: str, port: int | None = None) -> Iterator[Server]:
    """A server of the small policy until the end of the block; it also dies with this process, however that ends."""
    port = port or free_port()
    argv = [VLLM, str(ROOT / "tools" / "vllm_serve.py"), str(POLICY), "--port", str(port), *options]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", parent.__file__, *argv],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process.pid, log)
    try:
        _await_up(server, process)
        yield server
    finally:
        with suppress(ProcessLookupError):
            server.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _await_up(server: Server, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{server.url}/v1/models", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    tail = server.log.read_text(errors="replace")[-4000:]
    pytest.fail(f"vLLM did not come up within {START_S:g} s (exit code {process.poll()}):\n{tail}")


# ---- the client


@asynccontextmanager
async def engine_on(server: Server, **options: Any) -> AsyncIterator[HttpEngine]:
    engine = await connect(server.url, id="e0", served_name="policy", limits=LIMITS, start_s=30.0, **options)
    try:
        yield engine
    finally:
        await engine.close()


def request(tokens: int, prompt: Any = PROMPT, *, salt: str = "", **sampling: Any) -> GenerateRequest:
    params = SamplingParams(max_tokens=tokens, **{"seed": 5, **sampling})
    return GenerateRequest(f"r{next(_names)}", np.asarray(prompt, np.int32), params, cache_salt=salt)


async def assert_a_stream_is_the_whole(engine: HttpEngine) -> None:
    """A streamed reply is the one that comes whole, and is told while it is sampled."""
    told: list[list[int]] = []
    whole = await engine.generate(request(40, salt="whole"))
    asked = msgspec.structs.replace(request(40, salt="streamed"), tell=lambda ids: told.append(list(ids)))
    streamed = await engine.generate(asked)
    assert streamed.token_ids.tolist() == whole.token_ids.tolist() == [id_ for ids in told for id_ in ids]
    assert len(told) > 4
    assert_same(streamed.logprobs, whole.logprobs)
    assert (streamed.finish, streamed.versions) == (whole.finish, whole.versions)


async def generating(engine: HttpEngine, more_than: int = 4) -> None:
    """Wait until it has sampled some more tokens. The server tells nobody: its counters are read."""
    began = (await engine.load()).generated_tokens
    async with asyncio.timeout(60):
        while (await engine.load()).generated_tokens < began + more_than:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def versions_of(reply: GenerateReply) -> list[int]:
    return [version for version, _ in reply.versions]


# ---- what to compare with


class Reference:
    """One set of weights."""

    def __init__(self, directory: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.directory = directory
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def logprobs(self, prompt: Any, sampled: Any, temperature: float = 1.0) -> NDArray[np.float32]:
        """Of each of the sampled ids, given all before it."""
        import torch

        ids = np.concatenate([np.asarray(prompt), np.asarray(sampled)]).astype(np.int64)
        with torch.no_grad():
            logits = self._model(input_ids=torch.from_numpy(ids)[None]).logits[0].float() / temperature
        table = logits.log_softmax(-1).numpy()
        first = len(prompt)
        found: NDArray[np.float32] = table[np.arange(first - 1, len(ids) - 1), ids[first:]]
        return found


def assert_same(found: NDArray[np.float32], expected: NDArray[np.float32], *, usual: float = USUAL) -> None:
    """Equal but for the rounding of bfloat16: in the mean within `usual`, everywhere within `WORST`."""
    gaps = np.abs(found - expected)
    assert gaps.max() < WORST, f"largest {gaps.max():.4f} at {gaps.argmax()} of {len(gaps)}"
    assert gaps.mean() < usual, f"mean {gaps.mean():.4f} of {len(gaps)}"


def differs(found: NDArray[np.float32], expected: NDArray[np.float32]) -> bool:
    """Of other weights, beyond any rounding."""
    return bool(np.abs(found - expected).mean() > 3 * USUAL)


# ---- a whole run


async def run_to_end(config: Path, *words: str) -> str:
    """`paceline run` in a process of its own, which must end well; what it wrote to its output."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "paceline", "run", str(config), *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, err.decode()[-4000:]
    return out.decode()
