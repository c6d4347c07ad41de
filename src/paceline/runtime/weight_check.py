"""Whether an engine serves the weights it was given, by what it samples rather than by what it says.

A server was seen to accept a reload, report success and the new version, and answer with new layers under an old
head. Its output had changed, so nothing short of comparing numbers notices. Trainers therefore publish, beside the
weights, a few prompts with what the new weights make of them; after a load the engine is asked for the
most likely next token of each, and its logprobs are compared with the trainer's.
Where a trainer publishes none, the engine's word is taken.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from paceline.domain.ids import Version
from paceline.domain.probe import Probe
from paceline.domain.transfer import TRANSFER_FILE
from paceline.errors import EngineError
from paceline.ports import GenerateRequest, Samples, SamplingParams

log = logging.getLogger(__name__)

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf", TRANSFER_FILE)


class ProbeCheck:
    """Looks at a directory before a load and at the engine after it. One serves all engines of a run."""

    def __init__(self, tolerance: float, read: Callable[[Path], Sequence[Probe]]) -> None:
        """`tolerance`: mean difference of logprobs, in nats, up to which an engine is believed; 0 asks for nothing.

        `read` finds the probes of a weight directory; called in a thread.
        """
        self._tolerance, self._read = tolerance, read
        self._numbers = itertools.count()

    async def before(self, path: str) -> None:
        """EngineError if the weights are not there (any more): a server told to load nothing may not survive it."""
        if not await asyncio.to_thread(_has_weights, Path(path)):
            raise EngineError(
                f"there are no weights at {path}: was the version removed before it was loaded?"
            )

    async def after(self, engine: Samples, version: Version, path: str) -> None:
        """EngineError, with both numbers, if the engine samples otherwise than the trainer computes."""
        if not self._tolerance:
            return
        probes = await asyncio.to_thread(self._read, Path(path))
        if not probes:
            log.info("%s holds no probes: engine %s is believed", path, engine.info.id)
            return
        gaps = await asyncio.gather(*(self._gap(engine, version, probe) for probe in probes))
        mean = sum(gap for gap, _ in gaps) / len(gaps)
        if not mean <= self._tolerance:
            _, worst = max(gaps)
            raise EngineError(
                f"engine {engine.info.id} took v{version} from {path} and does not serve it: {worst}; mean gap "
                f"{mean:.3f} over {len(gaps)} probes, engine.probe_tolerance is {self._tolerance:g}. Restart the "
                "server; if it does so again, it cannot reload this model in place"
            )

    async def _gap(self, engine: Samples, version: Version, probe: Probe) -> tuple[float, str]:
        # A salt that nothing else has: a cached prefix may be of the very weights that are in doubt.
        name = f"probe-v{version}-{next(self._numbers)}"
        request = GenerateRequest(
            name,
            np.array(probe.token_ids, np.int32),
            SamplingParams(max_tokens=1, temperature=0.0),
            session=name,
            cache_salt=name,
        )
        reply = await engine.generate(request)
        if not len(reply.token_ids):
            raise EngineError(f"engine {engine.info.id} answered a probe of v{version} with no token")
        token, found = int(reply.token_ids[0]), float(reply.logprobs[0])
        expected = dict(probe.next).get(token)
        if expected is not None:
            gap = abs(found - expected)
            return gap, f"token {token} has logprob {found:.3f} there and {expected:.3f} in the trainer"
        best, at_best = probe.next[0]
        # The trainer's logprob of that token is unknown, but below all that it names.
        gap = max(0.0, found - min(logprob for _, logprob in probe.next))
        return gap, (
            f"its most likely token is {token} at logprob {found:.3f}, the trainer's {best} at {at_best:.3f}"
        )


def _has_weights(path: Path) -> bool:
    return path.is_dir() and any(next(path.glob(pattern), None) for pattern in _WEIGHTS)
