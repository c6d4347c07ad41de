"""Whether a seed pins a response of a real vLLM: what `scheduling.late` rests on. `docs/scheduling.md` records the answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from vllm_kit import PROMPT, Server, engine_on, generating, request

from paceline.engines.http import HttpEngine


@pytest.fixture
async def engine(server: Server, weights: list[Path]) -> AsyncIterator[HttpEngine]:
    async with engine_on(server) as engine:
        await engine.update_weights(0, str(weights[0]))
        yield engine


def agree(one: np.ndarray, other: np.ndarray) -> int:
    """Tokens until the two differ."""
    n = min(len(one), len(other))
    differ = np.flatnonzero(one[:n] != other[:n])
    return int(differ[0]) if len(differ) else n


@pytest.mark.usefixtures("endless")
async def test_a_seed_repeats_a_whole_response_and_a_cut_one_is_its_beginning(engine: HttpEngine) -> None:
    """What `pinned` would need: sampled again from its beginning, alone or in company, a response is the same."""
    first = await engine.generate(request(96, seed=5))
    again = await engine.generate(msgspec.structs.replace(request(96, seed=5), request_id="again"))
    cut = await engine.generate(msgspec.structs.replace(request(24, seed=5), request_id="cut"))
    crowd = [msgspec.structs.replace(request(96, seed=100 + i), request_id=f"c{i}") for i in range(6)]
    among, *_ = await asyncio.gather(
        engine.generate(msgspec.structs.replace(request(96, seed=5), request_id="among")),
        *(engine.generate(one) for one in crowd),
    )
    print("again", agree(first.token_ids, again.token_ids), "cut", agree(first.token_ids, cut.token_ids),
          "among others", agree(first.token_ids, among.token_ids), "of", len(first.token_ids))  # fmt: skip
    assert agree(first.token_ids, again.token_ids) == 96
    assert agree(first.token_ids, cut.token_ids) == 24


@pytest.mark.usefixtures("endless")
async def test_a_seed_does_not_survive_an_abort_and_a_resumption(engine: HttpEngine) -> None:
    """A request's noise begins anew with each request: the rest of a response that was cut is another one."""
    whole = await engine.generate(request(200, seed=5))
    running = asyncio.ensure_future(
        engine.generate(msgspec.structs.replace(request(200, seed=5), request_id="cut-short"))
    )
    await generating(engine)
    await engine.abort("cut-short")
    first = await running
    done = len(first.token_ids)
    assert first.finish == "abort"
    assert 0 < done < 200
    assert agree(whole.token_ids, first.token_ids) == done  # up to there it is the same
    rest = await engine.generate(
        msgspec.structs.replace(
            request(200 - done, np.concatenate([np.array(PROMPT, np.int32), first.token_ids]), seed=5),
            request_id="rest",
        )
    )
    same = agree(whole.token_ids[done:], rest.token_ids)
    print("aborted after", done, "then the same for", same, "of", 200 - done)
    assert same < 200 - done
    # It is the noise of the beginning that comes again.
    fresh = await engine.generate(msgspec.structs.replace(request(8, seed=5), request_id="fresh"))
    assert len(fresh.token_ids) == 8
