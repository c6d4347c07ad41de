"""One request to a modelled engine, and what an engine counts."""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from paceline.domain.ids import Version
from paceline.domain.rollout import VersionRuns

Chain = tuple[tuple[Hashable, int], ...]
"""Shared segments at the start of a context, each with its whole blocks; named so that equal names mean equal tokens and
the same weights."""


class Call:
    """One request: a context, and how many tokens to sample behind it."""

    __slots__ = (
        "alignment",
        "cached",
        "chain",
        "entry",
        "finish_step",
        "joined_sampled",
        "joined_step",
        "key",
        "likely",
        "marks",
        "missing",
        "own",
        "prompt",
        "references",
        "restored",
        "reusable",
        "running",
        "sampled",
        "shared_tokens",
        "started",
        "target",
    )

    def __init__(
        self,
        key: Hashable,
        prompt: int,
        target: int,
        *,
        started: float = 0.0,
        own: Hashable = None,
        chain: Chain = (),
        block: int = 16,
        restored: int = 0,
        references: int = 0,
        reusable: int | None = None,
    ) -> None:
        """`own` names the conversation in the prefix cache (`key` when left out). `restored`: tokens of the context whose
        KV was brought from elsewhere, so that they need no prefill. `references`: other answers that an engine which
        speculates may take drafts from. `reusable`: tokens of the context that its conversation had when it was cached; None:
        all that is cached of it."""
        self.key = key
        self.prompt = prompt
        self.target = target
        """Tokens to sample."""
        self.started = started
        self.own = key if own is None else own
        self.chain = chain
        self.restored = restored
        self.references = references
        self.reusable = reusable
        self.likely = 0
        """How likely a draft for it is right, in millionths."""
        self.shared_tokens = block * sum([blocks for _, blocks in chain]) if chain else 0
        self.sampled = 0
        """Tokens sampled; while it decodes, those by the time it began to."""
        self.cached = 0
        """Tokens of the prompt that needed no prefill when it first entered."""
        self.running = -1
        """-1: it was not sent yet; 0: it waits; 1: it is being prefilled; 2: it decodes; 3: it has left."""
        self.missing = 0
        """Tokens of the context that are still to be computed."""
        self.entry = -1
        """Number of its last entry into the batch; -1 before the first."""
        self.joined_step = 0
        self.joined_sampled = 0
        self.finish_step = 0
        self.alignment = 0
        """Tokens of its own in the KV cache, less the step count: constant while it decodes."""
        self.marks: list[tuple[Version, int]] | None = None
        """(version, tokens sampled in all by the time it was replaced)."""

    @property
    def has_left(self) -> bool:
        """Whether its engine is done with it."""
        return self.running == 3

    def versions(self, version: Version) -> VersionRuns:
        """Run-length over what it sampled; `version` is what its engine holds now."""
        if self.marks is None:
            return ((version, self.sampled),) if self.sampled else ()
        runs: list[tuple[Version, int]] = []
        done = 0
        for of, until in (*self.marks, (version, self.sampled)):
            if until > done:
                runs.append((of, until - done))
                done = until
        return tuple(runs)


class Totals(msgspec.Struct):
    """What an engine has done since it started."""

    generated: int = 0
    """Tokens sampled."""
    prefilled: int = 0
    """Prompt tokens computed."""
    recomputed: int = 0
    """Of them, those that had been computed before: after a preemption or for new weights."""
    queries: int = 0
    """Prompt tokens looked up in the prefix cache."""
    hits: int = 0
    """Of them, those that were found, or brought from elsewhere."""
    preemptions: int = 0
    steps: int = 0
    """Of one token for each sequence that decodes."""
    passes: float = 0.0
    """Of the model: as many as steps, and fewer where it speculates."""
    events: int = 0
    """Requests that came, entered, were preempted or left, and stretches of equal steps: what had to be looked at."""
    busy_s: float = 0.0
    """Seconds with something to compute."""
    kv_area: float = 0.0
    """Blocks that running requests held, times seconds."""
