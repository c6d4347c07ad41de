"""S3: how far above the work bound a batch has to be, if answers that go to their cap are not to be late; rows of `make bench`.

The work bound has all caches full all the time. A step takes longest then, and an answer of the cap's length needs more of them
than that leaves time for. So engines that run such answers have to be kept emptier, and do less: if a batch takes T seconds,
one of their steps may take T / cap. Once it is known which answers these are, as few engines as can hold them need to be kept so.
Before, every engine may have some.

What that costs is reckoned here with perfect packing, whatever engine: no tail, no prefill in anybody's way, and no engine that waits.
It is an estimate of what orders can come to, and no bound: nothing proves that no order begins otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paceline.sim.bound import lower_bound
from paceline.sim.cells import Drawn, build
from paceline.sim.engine import Speed
from paceline.sim.metrics import confidence
from paceline.sim.plan import RolloutPlan
from paceline.sim.study import load_study

STUDY = Path(__file__).parents[1] / "examples" / "studies" / "s3-seer-qwen-vl.toml"
SEEDS = 20
KNOWN = {"at_once": 0.0, "at_half": 0.5, "never": 1.0}
"""Share of its tokens after which it is known of an answer that it goes to the cap."""
ROWS = tuple(f"pace_above_work_{name}" for name in KNOWN)


def above_work(
    plans: Sequence[RolloutPlan], speed: Speed, engines: int, group_size: int, known: float
) -> float:
    """Share of the work bound's seconds that is needed on top of them."""
    prompts, lengths = np.array([(plan.prompt, plan.sampled) for plan in plans]).T
    work_s = lower_bound(prompts, lengths, speed, engines, group_size=group_size).work_s
    area = float((prompts * lengths + lengths * lengths / 2).sum())
    kept_area = float((prompts * lengths / group_size + lengths * lengths / 2).sum())
    # A step is a fixed part and the reading of its contexts; at the work bound they fill the cache, a group's prompt once.
    steps = kept_area / speed.kv_tokens / engines
    fixed_s = (work_s - area * speed.kv_s / engines) / steps
    full_s = work_s / steps
    cap = lengths.max()
    longest = lengths >= cap
    shares = (np.arange(1000) + 0.5) / 1000
    held = prompts[longest].sum() + shares * cap * longest.sum()  # tokens, as the longest answers grow

    def area_in(seconds: float) -> float:
        step_s = min(full_s, seconds / cap)
        kept = np.minimum(engines, held * speed.kv_s / (step_s - fixed_s))
        kept[shares < known] = engines
        paced, full = ((1 - fixed_s / each) / speed.kv_s for each in (step_s, full_s))
        return seconds * float((kept * paced + (engines - kept) * full).mean())

    low, high = max(work_s, 1.01 * fixed_s * cap), 3 * work_s
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if area_in(middle) >= area else (middle, high)
    return high / work_s - 1


def drawn(seed: int) -> tuple[Sequence[RolloutPlan], Speed, int, int]:
    """One batch of the study, its engines, and the size of its groups."""
    study = load_study(STUDY)
    policy = next(each for each in study.policy if each.name == "divided")
    simulation = build(study, policy, study.workload[0], seed)
    (workload,) = simulation.workloads.values()
    assert isinstance(workload, Drawn)
    while len(plans := workload.between(0.0, np.inf)) < (study.batch.rollouts or 0):
        simulation.run(until=simulation.now + 10.0)
    engine = next(iter(simulation.engines.values()))
    return plans, engine.speed, len(simulation.engines), study.workload[0].env[0].group_size


def rows(seeds: Sequence[int] = range(1, SEEDS + 1)) -> list[dict[str, Any]]:
    batches = [drawn(seed) for seed in seeds]
    made = []
    for name, known in KNOWN.items():
        mean, half = confidence([above_work(*batch, known) for batch in batches])
        note = f"± {half:.3f}, {len(batches)} seeds of S3, perfectly packed, the longest answers known {name.replace('_', ' ')}"
        row = {"name": f"pace_above_work_{name}", "value": mean, "unit": "of the bound", "note": note}
        made.append(row | {"target": None, "ok": None})
    return made
