"""Start the engine as a process of its own and know when it serves. Imports no torch."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import IO, Any, cast

from paceline.engines.embedded.options import TOKEN_VARIABLE, EngineOptions
from paceline.errors import EngineError


@dataclass(slots=True)
class EngineProcess:
    """A running engine. It ends with `stop`, and by itself when this process dies."""

    url: str
    pid: int
    ready: dict[str, Any]
    """What it said when it could serve: max_model_len, kv_cache_size_tokens, weight_version, ..."""
    _popen: subprocess.Popen[bytes]

    @classmethod
    def start(cls, options: EngineOptions, *, stderr: Any = None, timeout_s: float = 120.0) -> EngineProcess:
        """Blocks until the engine serves (seconds: torch is imported). EngineError if it ends or hangs instead.

        `stderr` as in subprocess: None shares ours.
        """
        popen = subprocess.Popen(
            [sys.executable, "-m", "paceline.engines.embedded", *options.arguments(), "--exit-with-stdin"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, **({TOKEN_VARIABLE: options.token} if options.token else {})},
            bufsize=0,
        )
        line, stdout, deadline = b"", cast(IO[bytes], popen.stdout), time.monotonic() + timeout_s
        try:
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
