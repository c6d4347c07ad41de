"""What calls in flight sample while it is being found out whether new weights are what they should be.

    load ─▶ resume ─▶ the probe ─┬─ agrees ─▶ replies are handed over as they are
              │                  └─ differs ─▶ calls are stopped; what those weights sampled is cut off
              └ a call that ends meanwhile waits for the word, and holds nothing that the probe needs

A load that fails leaves a server with weights that may be half new: its calls are stopped before it works again, with
what they had sampled until it was paused. So no token of weights that nobody has published trains under a version's name.
"""

from __future__ import annotations

import asyncio

import msgspec

from paceline.domain.ids import Version
from paceline.ports import GenerateReply


class Doubt:
    """About one version in one engine, from before it is loaded until it is believed or not."""

    __slots__ = ("_word", "version")

    def __init__(self, version: Version) -> None:
        self.version = version
        self._word: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        return not self._word.done()

    @property
    def is_settled_well(self) -> bool:
        return self._word.done() and self._word.result()

    def settle(self, is_trusted: bool) -> None:
        self._word.set_result(is_trusted)

    async def is_trusted(self) -> bool:
        """Waits for the word. Whoever waits may be cancelled; the others wait on."""
        return await asyncio.shield(self._word)


def before(reply: GenerateReply, version: Version) -> GenerateReply:
    """The part of a reply that was sampled before `version` came in; all of it, or what an abort then would have left."""
    count, runs = 0, []
    for sampled_by, tokens in reply.versions:
        if sampled_by == version:
            break
        runs.append((sampled_by, tokens))
        count += tokens
    if count == len(reply.token_ids):
        return reply
    return msgspec.structs.replace(
        reply,
        token_ids=reply.token_ids[:count],
        logprobs=reply.logprobs[:count],
        versions=tuple(runs),
        finish="abort",
        stop_reason=None,
    )
