"""Workloads by name. Where each comes from is in `docs/benchmarks/scheduling.md`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from paceline.sim.workloads.agents import AgentTurns, Tool
from paceline.sim.workloads.reasoning import ReasoningLengths

_SMALL_TOOLS = (
    Tool(share=55, median_s=0.05),
    Tool(share=44, median_s=6.0, sigma=0.6),
    Tool(share=1, median_s=60.0, tail_s=60.0),
)


def _split(median: float, task: float, sample: float, **more: float | int) -> ReasoningLengths:
    """Standard deviations of the logarithm by task and by sample."""
    variance = task**2 + sample**2
    return ReasoningLengths.model_validate(
        {"median": median, "sigma": variance**0.5, "task_share": task**2 / variance, **more}
    )


PRESETS: Final[Mapping[str, ReasoningLengths | AgentTurns]] = {
    "rp-8k": _split(496, 0.49, 0.36, cap=8192, runaway_tasks=0.46, runaway_a=1.6, runaway_b=5.3),
    "rp-16k": _split(646, 0.47, 0.65, cap=16_384, runaway_tasks=0.58, runaway_a=0.57, runaway_b=9.97),
    "rp-32k": _split(745, 0.63, 0.62, cap=32_768, runaway_tasks=0.29, runaway_a=0.89, runaway_b=9.4),
    "seer-qwen-vl": ReasoningLengths(median=4700, sigma=1.0, cap=40_960, icc=0.85, prompt=600),
    "seer-moonlight": ReasoningLengths(median=17_500, sigma=0.85, cap=65_536, icc=0.73),
    "seer-k2": ReasoningLengths(median=32_500, sigma=0.75, cap=98_304, icc=0.73),
    "tailsieve": ReasoningLengths(
        median=1160, sigma=0.988, cap=16_384, task_share=0.648, checkpoint_share=0.022, task_checkpoint_share=0.069
    ),
    "dora": ReasoningLengths(median=1320, sigma=1.1, cap=30_000, icc=0.73),
    "swe-small": AgentTurns(turns=24, tools=_SMALL_TOOLS),
    "swe-real": AgentTurns(
        turns=42.3, scaffold=12_000, prompt=1400, sampled=145, sampled_sigma=1.07, observed=303, observed_sigma=1.43,
        max_observed=20_000, max_turns=150, cap=131_072,
        tools=(Tool(share=62, median_s=0.03), Tool(share=36, median_s=6.6, sigma=0.45), Tool(share=2, median_s=20.0, tail_s=12.0)),
    ),
    "search": AgentTurns(
        turns=5, turns_sigma=0.3, max_turns=8, prompt=800, sampled=200, observed=1800, observed_sigma=0.4,
        tools=(Tool(share=1, median_s=1.4, sigma=0.8),),
    ),
    "math-tool": AgentTurns(
        turns=2.5, turns_sigma=0.5, max_turns=6, prompt=300, sampled=700, sampled_sigma=0.9, observed=80,
        observed_sigma=0.8, tools=(Tool(share=1, median_s=0.05),),
    ),
    "code-single": ReasoningLengths(median=900, sigma=0.9, cap=16_384, icc=0.6, score_s=0.03, score_sigma=1.6),
}  # fmt: skip
"""Name -> what is drawn."""
