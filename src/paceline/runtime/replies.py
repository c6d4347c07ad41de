"""What an engine answered, checked once before it is recorded, and how its errors are told."""

from __future__ import annotations

from typing import Final

import numpy as np

from paceline.core.samples import are_possible, impossible
from paceline.domain.ids import EngineId
from paceline.errors import EngineError, ImpossibleLogprobs
from paceline.ports import GenerateReply

_INT32: Final = np.dtype(np.int32)
_FLOAT32: Final = np.dtype(np.float32)


def check_reply(reply: GenerateReply, max_tokens: int) -> GenerateReply:
    """The reply, if its tokens can be trained on. EngineError names the position and the value otherwise."""
    ids, logprobs = reply.token_ids, reply.logprobs
    count = len(ids)
    if count != len(logprobs):
        raise EngineError(
            f"the engine returned {count} token ids and {len(logprobs)} logprobs; both are needed for each sampled "
            "token (vLLM: return_token_ids and logprobs=0 or more)"
        )
    if count > max_tokens:
        raise EngineError(f"the engine returned {count} tokens where at most {max_tokens} were asked for")
    runs = reply.versions
    if (runs[0][1] if len(runs) == 1 else sum([n for _, n in runs])) != count:
        raise EngineError(f"the engine's versions {reply.versions} do not add up to its {count} tokens")
    if not count:
        return reply
    kinds = ids.dtype, logprobs.dtype
    if (kinds[0] is not _INT32 or kinds[1] is not _FLOAT32) and kinds != (_INT32, _FLOAT32):
        raise EngineError(f"the engine client returned {ids.dtype} ids and {logprobs.dtype} logprobs")
    if not are_possible(logprobs):
        bad = np.flatnonzero(impossible(logprobs))
        at = int(bad[0])
        raise ImpossibleLogprobs(
            f"the engine returned {float(logprobs[at])} as the logprob of sampled token {at} (id {int(ids[at])}); "
            "a sampled token has a finite logprob of at most 0",
            bad=len(bad),
            tokens=count,
        )
    return reply


def told(error: BaseException, engine: EngineId) -> str:
    """What a call's error says, with the engine that it was sent to."""
    text = str(error)
    if not isinstance(error, EngineError):
        text = f"{type(error).__name__}: {text}"
    return text if engine in text else f"engine {engine}: {text}"
