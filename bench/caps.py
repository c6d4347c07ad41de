"""S5 and S6: agents, and who decides how many of them an engine holds; rows of `make reproduce`.

One engine of the four in `examples/studies/s5-swe.toml`: engines share nothing but the line of tasks, and the baselines are
rules for one. The production core and controllers on the modelled engine; goodput is tokens a second of rollouts that ended
by themselves, after ten minutes.

S6 has a *clairvoyant* yardstick. The drift is cut into stretches of an hour; for the median number of turns in the middle of
each, fixed caps are swept with turns that stay there; the best of them is the cap of the stretch. It knows the drift, and is
not the best that knowing it could do: rollouts begun in one stretch run into the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from bench._clairvoyant import ScheduledCap
from bench._concur import ConcurCap
from bench._programs import ProgramCap
from bench.admission import RAMP_S, SWEEP
from paceline.core.admission import Admission
from paceline.sim.cells import run_cell
from paceline.sim.study import StudyConfig, load_study

STUDIES = Path(__file__).parents[1] / "examples" / "studies"
SECONDS, LOOK_S = 7200.0, 30.0
GUIDED = ("predictive", "adaptive", "adaptive, begun there", "concur", "programs")
"""Beside fixed caps. `adaptive, begun there` begins with the best of them, which nobody knows beforehand."""

BEYOND = 5 / 3
"""By how much a cap goes beyond the best one, to see what that costs."""

DRIFT_S, STRETCHES, TURNS = 14_400.0, 4, (8.0, 48.0)
DRIFT_CAPS = (14, 18, 22, 26, 32, 40, 52, 68)
SWEEP_SEED, SWEEP_S = 101, 3600.0
"""Of the sweeps that the clairvoyant cap is chosen by; runs that are measured have seeds of their own."""


class Job(NamedTuple):
    """One run: a number is a fixed cap, a tuple one for each stretch, a name another rule, begun with `first` rollouts."""

    seed: int
    rule: str | int | tuple[int, ...]
    tool_s: float = 6.0
    turns: float = 24.0
    turns_at_end: float | None = None
    seconds: float = SECONDS
    first: int = 9


class Seen(NamedTuple):
    """What it came to."""

    goodput: float
    wasted: float
    """Tokens of rollouts that ended and did not train, by all; those aside that took longer than the study's bound on staleness."""
    stale: float
    """Tokens of the latter, by all: a matter of the bound, and the same whoever decides how many run."""
    ramp_s: float


def study_of(job: Job) -> StudyConfig:
    data = load_study(STUDIES / "s5-swe.toml").model_dump()
    data["study"] |= {"seconds": job.seconds, "skip_seconds": RAMP_S, "sample_s": LOOK_S}
    data["engines"]["count"] = 1
    data["batch"]["rollouts"] = 16
    tools = [
        {"share": 55, "median_s": 0.05},
        {"share": 44, "median_s": job.tool_s, "sigma": 0.6},
        {"share": 1, "median_s": 10 * job.tool_s, "tail_s": 10 * job.tool_s},
    ]
    agents: dict[str, Any] = {"turns": job.turns, "tools": tools}
    if job.turns_at_end is not None:
        agents |= {"turns_at_end": job.turns_at_end, "drift_s": job.seconds}
    data["workload"] = [{"name": "agents", "env": [{"agents": agents}]}]
    admission: dict[str, Any] = {"type": "fixed", "cap": job.rule if isinstance(job.rule, int) else 1024}
    if job.rule in ("predictive", "adaptive"):
        admission = {"type": job.rule}
    elif job.rule == "adaptive, begun there":
        admission = {"type": "adaptive", "initial_inflight": job.first}
    data["policy"] = [data["policy"][0] | {"name": str(job.rule), "admission": admission}]
    return StudyConfig.model_validate(data)


def baseline(job: Job) -> Admission | None:
    """A rule that no config names; None: the study's own."""
    if isinstance(job.rule, tuple):
        return ScheduledCap(job.rule, job.seconds / len(job.rule))
    if job.rule == "concur":
        return ConcurCap(job.first)
    return ProgramCap(reserve=256, first=2500) if job.rule == "programs" else None


def measure(job: Job) -> Seen:
    study = study_of(job)
    cell = run_cell(study, study.policy[0], study.workload[0], job.seed, admission=baseline(job))
    numbers = cell.numbers
    stale = numbers["stale_share"]
    return Seen(numbers["ended_per_s"], numbers["lost_share"] - stale, stale, numbers["ramp_s"])


def run(jobs: Sequence[Job], processes: int) -> dict[Job, Seen]:
    if processes == 1:
        return {job: measure(job) for job in jobs}
    with ProcessPoolExecutor(processes) as pool:
        return dict(zip(jobs, pool.map(measure, jobs), strict=True))


class Table(NamedTuple):
    """Rules against a yardstick, seed by seed."""

    yardstick: str
    ratios: dict[str, list[float]]
    seen: dict[str, list[Seen]]
    base: list[Seen]
    """What the yardstick came to."""


def stationary(tool_s: float, seeds: int, processes: int) -> Table:
    """S5 at one median of the tools: rules against the best of the fixed caps over these seeds."""
    numbers = range(1, seeds + 1)
    found = run([Job(seed, cap, tool_s) for cap in SWEEP[tool_s] for seed in numbers], processes)
    best = max(SWEEP[tool_s], key=lambda cap: sum(found[Job(seed, cap, tool_s)].goodput for seed in numbers))
    found |= run([Job(seed, rule, tool_s, first=_first(rule, best)) for rule in GUIDED for seed in numbers], processes)  # fmt: skip
    seen = {
        rule: [found[Job(seed, rule, tool_s, first=_first(rule, best))] for seed in numbers]
        for rule in GUIDED
    }
    beyond = round(BEYOND * best)
    found |= run([Job(seed, beyond, tool_s) for seed in numbers], processes)
    seen[f"a fixed cap of {beyond}"] = [found[Job(seed, beyond, tool_s)] for seed in numbers]
    base = [found[Job(seed, best, tool_s)] for seed in numbers]
    return Table(f"the best fixed cap, {best}", _ratios(seen, base), seen, base)


def drifting(seeds: int, processes: int) -> Table:
    """S6: rules against the clairvoyant cap."""
    caps = clairvoyant(processes)
    numbers = range(1, seeds + 1)

    def job(seed: int, rule: str | tuple[int, ...]) -> Job:
        return Job(seed, rule, 6.0, TURNS[0], TURNS[1], DRIFT_S, _first(str(rule), caps[0]))

    found = run([job(seed, rule) for rule in (caps, *GUIDED) for seed in numbers], processes)
    seen = {rule: [found[job(seed, rule)] for seed in numbers] for rule in GUIDED}
    base = [found[job(seed, caps)] for seed in numbers]
    return Table(f"caps of {', '.join(map(str, caps))} by the hour", _ratios(seen, base), seen, base)


def clairvoyant(processes: int) -> tuple[int, ...]:
    """The cap of each stretch."""
    low, high = TURNS
    turns = [low * (high / low) ** ((number + 0.5) / STRETCHES) for number in range(STRETCHES)]
    jobs = {
        number: [Job(SWEEP_SEED, cap, turns=median, seconds=SWEEP_S) for cap in DRIFT_CAPS]
        for number, median in enumerate(turns)
    }
    found = run([job for each in jobs.values() for job in each], processes)
    best = [max(each, key=lambda job: found[job].goodput) for each in jobs.values()]
    return tuple(job.rule for job in best if isinstance(job.rule, int))


def _first(rule: str, best: int) -> int:
    """Rollouts that a rule begins with: what fits at the longest context, or as many as were best."""
    return best if rule == "adaptive, begun there" else 9


def _ratios(seen: dict[str, list[Seen]], base: Sequence[Seen]) -> dict[str, list[float]]:
    return {
        rule: [s.goodput / b.goodput for s, b in zip(each, base, strict=True)] for rule, each in seen.items()
    }
