"""Start the engine as a process of its own and know when it serves. Imports no torch."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from paceline.errors import EngineError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The engine's command line; None leaves an option to the engine's default."""

    model: str | Path
    host: str = "127.0.0.1"
    port: int = 0
    """0 takes a free one."""
    kv_tokens: int | None = None
    block_size: int | None = None
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    max_model_len: int | None = None
    dtype: str | None = None
    seed: int | None = None
    served_model_name: str | None = None
    weight_version: str | None = None

    def command(self) -> list[str]:
        options = [(f.name.replace("_", "-"), getattr(self, f.name)) for f in fields(self)]
        given = [text for name, value in options if value is not None for text in (f"--{name}", str(value))]
        return [sys.executable, "-m", "paceline.engines.embedded", *given]


@dataclass(slots=True)
class EngineProcess:
    """A running engine. It ends with `stop`, and by itself when this process dies."""

    url: str
    pid: int
    ready: dict[str, Any]
    """What it said when it could serve: max_model_len, kv_cache_size_tokens, weight_version, ..."""
    _popen: subprocess.Popen[bytes]

    @classmethod
    def start(
        cls,
        options: EngineOptions,
        *,
        env: dict[str, str] | None = None,
        stderr: Any = None,
        timeout_s: float = 120.0,
    ) -> EngineProcess:
        """Blocks until the engine serves (seconds: torch is imported). EngineError if it ends or hangs instead.

        `stderr` as in subprocess: None shares ours. The token of a non-loopback host goes in `env`.
        """
        popen = subprocess.Popen(
            [*options.command(), "--exit-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **(env or {}), "OMP_NUM_THREADS": "1"},
            bufsize=0,
        )
        line, deadline = b"", time.monotonic() + timeout_s
        try:
            stdout = popen.stdout
            if stdout is None:
                raise EngineError("the engine's stdout is not a pipe")
            while not line.endswith(b"\n"):
                left = deadline - time.monotonic()
                if left <= 0 or not select.select([stdout], [], [], left)[0]:
                    raise EngineError(f"the embedded engine did not serve within {timeout_s:g} s")
                chunk = stdout.read(4096)
                if not chunk:
                    raise EngineError(
                        f"the embedded engine ended with code {popen.wait()} before it served; see its stderr"
                    )
                line += chunk
            ready = dict(json.loads(line))
        except BaseException:
            popen.kill()
            _close(popen)
            raise
        return cls(str(ready["url"]), popen.pid, ready, popen)

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        return self._popen.poll()

    def stop(self, timeout_s: float = 5.0) -> int:
        """Ask it to end, then make it; returns its exit code. May be called twice."""
        if self._popen.poll() is None:
            self._popen.terminate()
            try:
                self._popen.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._popen.kill()
        _close(self._popen)
        return self._popen.returncode

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self._popen.kill()
        _close(self._popen)


def _close(popen: subprocess.Popen[bytes]) -> None:
    popen.wait()
    for pipe in (popen.stdin, popen.stdout):
        if pipe is not None:
            pipe.close()
