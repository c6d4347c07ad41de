"""The link to a server after its client was closed: the engine in its slot has been replaced."""

from __future__ import annotations

import pytest

from paceline.engines.http.link import Limits, Link, LinkLost
from paceline.engines.http.retry import Retry


async def test_a_client_that_was_closed_is_an_engine_that_does_not_answer() -> None:
    link = Link("http://127.0.0.1:9", "engine e0", Limits(), Retry())
    await link.close()
    with pytest.raises(LinkLost, match="was closed") as lost:
        await link.send("GET", "/health")
    assert not lost.value.arrived
