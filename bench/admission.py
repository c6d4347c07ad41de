"""Goodput of the admission controllers against the best fixed cap, on a modelled engine in virtual time.

The real core and the real controllers; the engine is `paceline.testing.EngineModel` (an 8B model on one H100), the
workload `swe_small`: about 24 turns of growing context, tool waits with medians of 1 s (short), 30 s (long) and, for
the table, 6 s and 120 s. Two virtual hours each, the first ten minutes not counted, two seeds, which are not those that
settings were tried out on. The best fixed cap is the best of a sweep, known only afterwards. The rows of the same name
without `modelled_` are those of a real engine: `bench/vllm_admission.py`.

    python -m bench --only admission        the rows
    python -m bench.admission               the whole table
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from typing import Any

from paceline.core.admission import AdaptiveCap, Admission, FixedCap, PredictiveCap
from paceline.sim.metrics import ramp_s
from paceline.testing.closed_loop import ClosedLoop, swe_small

SECONDS, RAMP_S, SEEDS = 7200.0, 600.0, (11, 12)
SWEEP = {
    1.0: (16, 18, 20, 22, 24, 26, 28, 32),
    6.0: (16, 20, 22, 24, 26, 28, 30, 32, 36),
    30.0: (24, 28, 32, 36, 40, 44, 48, 56, 64, 72),
    120.0: (64, 80, 96, 112, 128, 144),
}
NAMED = {"short": 1.0, "long": 30.0}
ROWS = tuple(
    f"modelled_admission_{kind}_vs_best_{name}" for kind in ("predictive", "adaptive") for name in NAMED
)

Job = tuple[float, int, str]


def controller(kind: str) -> Admission:
    if kind == "adaptive":
        return AdaptiveCap()
    return PredictiveCap() if kind == "predictive" else FixedCap(int(kind))


def measure(job: Job) -> dict[str, float]:
    """One run of one controller."""
    tool_s, seed, kind = job
    loop = ClosedLoop(controller(kind), swe_small(tool_s), seed=seed)
    trace = loop.run(SECONDS)
    after = [s for s in trace.samples if s.at >= RAMP_S]
    # Prompt tokens prefilled anew after the ramp: what parking and a cold cache cost.
    asked = max(1, after[-1].queries - after[0].queries)
    sampled = trace.good_tokens + trace.wasted_tokens
    return {
        "goodput": loop.goodput(RAMP_S),
        "cap": sum(s.cap for s in after) / len(after),
        "active": sum(s.active for s in after) / len(after),
        "hits": (after[-1].hits - after[0].hits) / asked,
        "parked": len(trace.parked),
        "wasted": trace.wasted_tokens / max(1, sampled),
        "ramp_s": ramp_s([s.at for s in trace.samples], [s.sampled for s in trace.samples], RAMP_S),
    }


def table(waits: tuple[float, ...]) -> dict[float, dict[str, dict[str, float]]]:
    """By tool wait and controller: the mean over the seeds."""
    kinds = {w: (*map(str, SWEEP[w]), "adaptive", "predictive") for w in waits}
    jobs = [(w, seed, kind) for w in waits for kind in kinds[w] for seed in SEEDS]
    with ProcessPoolExecutor(2) as pool:
        found = dict(zip(jobs, pool.map(measure, jobs), strict=True))
    return {
        w: {
            kind: {
                name: sum(found[w, seed, kind][name] for seed in SEEDS) / len(SEEDS)
                for name in found[w, SEEDS[0], kind]
            }
            for kind in kinds[w]
        }
        for w in waits
    }


def best_fixed(by_kind: dict[str, dict[str, float]]) -> tuple[str, float]:
    fixed = {kind: seen["goodput"] for kind, seen in by_kind.items() if kind.isdigit()}
    kind = max(fixed, key=lambda k: fixed[k])
    return kind, fixed[kind]


def rows() -> list[dict[str, Any]]:
    seen = table(tuple(NAMED.values()))
    result = []
    for kind, target in (("predictive", 0.97), ("adaptive", None)):
        for name, wait in NAMED.items():
            cap, best = best_fixed(seen[wait])
            mine = seen[wait][kind]
            value = mine["goodput"] / best
            note = (
                f"modelled engine, tool wait {wait:g} s: {mine['goodput']:.0f} of {best:.0f} tokens/s at a fixed cap of "
                f"{cap}; ramp {mine['ramp_s']:.0f} s, {mine['parked']:.0f} parked, {mine['wasted']:.2%} wasted"
            )
            ok = None if target is None else value >= target
            result.append(
                {"name": f"modelled_admission_{kind}_vs_best_{name}", "value": value, "unit": "of best"}
                | {"target": target, "ok": ok, "note": note}
            )
    return result


def main() -> None:
    for wait, by_kind in table(tuple(SWEEP)).items():
        cap, best = best_fixed(by_kind)
        print(f"\ntool wait {wait:g} s; best fixed cap {cap}")
        print(
            f"{'':>12} {'tokens/s':>9} {'of best':>8} {'cap':>6} {'in flight':>9} {'hits':>6} {'parked':>7} {'ramp s':>7}"
        )
        for kind, seen in by_kind.items():
            print(
                f"{kind:>12} {seen['goodput']:>9.0f} {seen['goodput'] / best:>8.3f} {seen['cap']:>6.0f} "
                f"{seen['active']:>9.1f} {seen['hits']:>6.2f} {seen['parked']:>7.1f} {seen['ramp_s']:>7.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
