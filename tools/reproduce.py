"""Reproduce what papers report of rollout scheduling, with the production core on modelled engines; `make reproduce`.

Writes the table of `docs/benchmarks/scheduling.md` between its markers. Each ratio is of paired seeds; only a baseline's
absolute time was fitted (one factor a scenario, `slow` in its study).

    make reproduce                                   everything, with 20 seeds
    make reproduce ARGS="--only S3 --seeds 5"        the rows of one scenario; the others stay as they are
    python -m tools.reproduce --help                 the same by hand, from the repository
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import caps
from bench._latencies import LATENCIES, as_shipped, left_out, mean_error

from paceline.cli.studies import simulate
from paceline.sim.bound import tail_probability
from paceline.sim.cells import Cell, paired, spread
from paceline.sim.engine import GPUS, MODELS, speed_of
from paceline.sim.metrics import confidence
from paceline.sim.study import StudyConfig, load_study

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "scheduling.md"
BEGIN, END = "<!-- reproduction -->", "<!-- /reproduction -->"


class Row:
    """One line: what was checked, what the paper has, what we have."""

    def __init__(
        self,
        check: str,
        paper: str,
        value: tuple[float, float | None],
        low: float | None = None,
        high: float | None = None,
        form: str = "{:.2f}",
    ) -> None:
        """`value`: the mean, and half the width of its interval, or None where no seeds are in it. Without `low` and `high` it is told beside others."""
        self.check, self.paper, self.low, self.high = check, paper, low, high
        self.value, self.half = value
        self.form = form

    def line(self, seeds: int) -> str:
        ours = self.form.format(self.value)
        half = "" if self.half is None else f" ± {self.form.format(self.half)}"
        allowed = verdict = ""
        if self.low is not None and self.high is not None:
            allowed = f"{self.form.format(self.low)} to {self.form.format(self.high)}"
            verdict = "holds" if self.low <= self.value <= self.high else "**misses**"
        count = "" if self.half is None else seeds
        return f"| {self.check} | {self.paper} | {ours}{half} | {count} | {allowed} | {verdict} |"


def latencies() -> list[Row]:
    """The engine model against measured times between tokens: decode with the mean context, alone."""
    errors = (
        ("mean error of 9 points", [as_shipped(point) for point in LATENCIES]),
        ("the same, each by a fit to the other 8", left_out(lambda point: point)),
        ("the same, each by a fit to the other models", left_out(lambda point: point.model)),
    )
    return [
        Row(f"time between tokens, {what}", "measured", (mean_error(of), None), 0.0, 0.10, "{:.3f}")
        for what, of in errors
    ]


def run(
    name: str,
    seeds: int,
    policies: Sequence[str],
    processes: int,
    scoring: dict[str, Any] | None = None,
    **changes: Any,
) -> list[Cell]:
    """Cells of a study that ships; `changes` are in its section `study`. `scoring`: of its environments."""
    study = load_study(ROOT / "examples" / "studies" / f"{name}.toml")
    data = study.model_dump()
    data["study"] |= {"seeds": seeds, "sample_s": None} | changes
    data["policy"] = [policy for policy in data["policy"] if policy["name"] in policies]
    for workload in data["workload"]:
        for env in workload["env"]:
            env["scoring"] = scoring
    return simulate(StudyConfig.model_validate(data), processes=processes)


def ratio(
    cells: Sequence[Cell], workload: str, policy: str, name: str, base: str = "synchronous"
) -> tuple[float, float]:
    found = paired(cells, policy, base, name, workload)
    assert found is not None
    return found.mean, found.half


def mean(cells: Sequence[Cell], policy: str, name: str) -> tuple[float, float]:
    found = spread([c for c in cells if c.policy == policy], name)
    assert found is not None
    return found.mean, found.half


def derived(
    cells: Sequence[Cell], policy: str, of: Callable[[dict[str, float]], float]
) -> tuple[float, float]:
    return confidence([of(c.numbers) for c in cells if c.policy == policy])


def s10(seeds: int, processes: int) -> list[Row]:
    return [
        Row("S10: batches of 128 with one of the 2%", "93%", (tail_probability(0.02, 128), None), 0.9245, 0.9255, "{:.4f}"),
    ]  # fmt: skip


def memory(seeds: int, processes: int) -> list[Row]:
    """How many rollouts the cache of a GPU of 80 GB holds beside the weights of an 8B model."""
    tokens = speed_of(MODELS["qwen3-8b"], GPUS["H100"], gpus=1, max_model_len=32_000).kv_tokens
    return [
        Row(f"memory: rollouts of {each:,} tokens in a GPU of 80 GB", f"{paper}", (tokens / each, None), 0.9 * paper, 1.1 * paper, "{:.1f}")
        for each, paper in ((8000, 47), (32_000, 12))
    ]  # fmt: skip


def s1(seeds: int, processes: int) -> list[Row]:
    policies = (
        "synchronous",
        "tail-rounds",
        "tail-rounds, tasks",
        "tail-rounds, rollouts",
        "overprovision-discard",
        "overlap-2",
    )
    cells = run("s1-rollpacker-16k", seeds, policies, processes)
    scored = run("s1-rollpacker-16k", seeds, WHOLE_STEPS, processes, SCORERS)
    # What is put off comes back every nine steps or so: three such cycles.
    cycles = run(
        "s1-rollpacker-16k", seeds, ("tail-rounds", "unbiased-tail", "overlap-2"), processes, steps=30
    )
    return [
        Row("S1 synchronous rollout, s (fitted)", "277", mean(cells, "synchronous", "rollout_s"), 235, 319, "{:.0f}"),
        Row("S1 tail rounds, rollout, times as fast", "3.15", ratio(cells, "rp-16k", "tail-rounds", "rollout_s"), 2.68, 3.62),
        Row("S1 the same, racing a quarter more tasks alone", "1.64", ratio(cells, "rp-16k", "tail-rounds, tasks", "rollout_s"), 1.23, 2.05),
        Row("S1 the same, racing half as many rollouts again alone", "2.41", ratio(cells, "rp-16k", "tail-rounds, rollouts", "rollout_s"), 1.81, 3.01),
        Row("S1 tail rounds, mean length trained", "claims 0", mean(cells, "tail-rounds", "length_mean"), -0.40, -0.26),
        Row("S1 race without keeping, mean length trained", "", mean(cells, "overprovision-discard", "length_mean"), -0.45, -0.30),
        Row("S1 `unbiased_tail`, rollout of 1,024, by that of tail rounds", "", ratio(cycles, "rp-16k", "tail-rounds", "rollout_s_per_1024", "unbiased-tail"), 0.0, 1.05),
        Row("S1 `unbiased_tail`, mean length trained", "", mean(cycles, "unbiased-tail", "length_mean"), -0.01, 0.01, "{:.3f}"),
        Row("S1 `unbiased_tail`, staleness", "", mean(cycles, "unbiased-tail", "staleness_max"), 0, 0, "{:.0f}"),
        Row("S1 overlap, lag 2, on the same GPUs, step, times as fast", "", ratio(cells, "rp-16k", "overlap-2", "step_s")),
        Row("S1 `unbiased_tail`, step of 1,024, by that of this overlap", "", ratio(cycles, "rp-16k", "overlap-2", "s_per_1024", "unbiased-tail")),
        Row("S1 this overlap, mean length trained", "", mean(cycles, "overlap-2", "length_mean"), -0.01, 0.01, "{:.3f}"),
        Row("S1 this overlap, staleness, most", "", mean(cycles, "overlap-2", "staleness_max"), form="{:.1f}"),
        *whole_steps("S1", "rp-16k", cells, scored, 1.48, 1.99),
        Row("S1 synchronous, share of a step that waits for scores", "0.05 to 0.13", waited(cells, scored), 0.05, 0.13),
    ]  # fmt: skip


def s1b(seeds: int, processes: int) -> list[Row]:
    cells = run("s1b-april", seeds, ("synchronous", "partial-2x"), processes)
    return [
        Row("S1b partial, twice over-issued: most versions", "at most 5", mean(cells, "partial-2x", "versions_max"), 1, 5, "{:.1f}"),
        Row("S1b the same, rollouts of several versions", "0.30 to 0.40", mean(cells, "partial-2x", "mixed_share"), 0.20, 0.50),
        Row("S1b the same, rollout, times as fast", "1.24 to 1.44", ratio(cells, "april", "partial-2x", "rollout_s"), 1.09, 1.59),
    ]  # fmt: skip


def s2(seeds: int, processes: int) -> list[Row]:
    cells = run("s2-rollpacker-32k", seeds, WHOLE_STEPS, processes)
    scorers = SCORERS | {"at_once": 2 * SCORERS["at_once"]}  # of twice the machines
    return [
        Row("S2 synchronous rollout, s (fitted)", "673", mean(cells, "synchronous", "rollout_s"), 572, 774, "{:.0f}"),
        Row("S2 tail rounds, rollout, times as fast", "3.96", ratio(cells, "rp-32k", "tail-rounds", "rollout_s"), 3.37, 4.55),
        *whole_steps("S2", "rp-32k", cells, run("s2-rollpacker-32k", seeds, WHOLE_STEPS, processes, scorers), 2.21, 2.48),
    ]  # fmt: skip


WHOLE_STEPS = ("synchronous", "tail-rounds")
SCORERS: dict[str, Any] = {"at_once": 64, "median_s": 4.25, "sigma": 1.0}
"""Of the 32 GPUs of S1. What counts is how long they take for 1,024 answers, 112 s: fitted to the 1.48."""


def whole_steps(
    scenario: str, workload: str, free: Sequence[Cell], scored: Sequence[Cell], alone: float, rewarded: float
) -> list[Row]:
    """Steps of rollouts, scoring and training. `free`: nothing waits to be scored; `scored`: there is a line before the scorers.
    `alone`, `rewarded`: what RollPacker reports of tail batching alone, and with its reward scheduling."""
    fitted = " (fitted)" if scenario == "S1" else ""
    return [
        Row(f"{scenario} tail rounds, steps with scoring and training{fitted}, times as fast", f"{alone:.2f}", ratio(scored, workload, "tail-rounds", "step_s"), 0.85 * alone, 1.15 * alone),
        Row(f"{scenario} the same where no score is waited for", f"{rewarded:.2f}", ratio(free, workload, "tail-rounds", "step_s"), 0.85 * rewarded, 1.15 * rewarded),
    ]  # fmt: skip


def waited(free: Sequence[Cell], scored: Sequence[Cell]) -> tuple[float, float]:
    """Share of a synchronous step in which nothing is left to do but to score."""
    at_once = {c.seed: c.numbers["rollout_s"] for c in free if c.policy == "synchronous"}
    return confidence(
        [
            (c.numbers["rollout_s"] - at_once[c.seed]) / c.numbers["step_s"]
            for c in scored
            if c.policy == "synchronous"
        ]
    )


def s3(seeds: int, processes: int) -> list[Row]:
    cells = run("s3-seer-qwen-vl", seeds, (*SEER, "kv-area"), processes)
    share = derived(cells, "synchronous", lambda n: n["tail_s"] / n["rollout_s"])
    # They stand still while the batch trains as well, which is no part of the rollout.
    idle = derived(cells, "synchronous", lambda n: 1 - (1 - n["idle"]) * n["seconds"] / n["rollout_s"])
    fitted, *divided = ordered("S3", cells, "seer-qwen-vl", ("3957", 3363, 4551), 1.42, 1.56)
    return [
        fitted,
        Row("S3 preemptions", "13,686", mean(cells, "synchronous", "preemptions"), 11_633, 15_739, "{:.0f}"),
        Row("S3 engines that stand still, share of the rollout", "0.37", idle, 0.27, 0.47),
        Row("S3 tail, share of the rollout", "0.58", share, 0.46, 0.70),
        *divided,
        *speculating("S3", cells, "seer-qwen-vl", 1.08, 2.04),
        *tails("S3", cells, "seer-qwen-vl", {"divided, no order": 0.79, "divided": 0.11, "divided, speculating": 0.05}),
        Row("S3 `divided`, above the work bound", "", mean(cells, "divided", "gap"), 0.0, 0.25, "{:.3f}"),
        Row("S3 `kv_area`, lengths learnt, above the work bound", "", mean(cells, "kv-area", "gap"), 0.0, 0.10, "{:.3f}"),
        Row("S3 the same, above what an order alone can do", "", mean(cells, "kv-area", "even_gap"), 0.0, 0.10, "{:.3f}"),
    ]  # fmt: skip


def s4(seeds: int, processes: int) -> list[Row]:
    cells = run("s4-moonlight", seeds, SEER, processes)
    return [
        *ordered("S4", cells, "seer-moonlight", ("3910", 3323, 4497), 1.41, 1.47),
        *speculating("S4", cells, "seer-moonlight", 1.16, 1.90),
        *tails("S4", cells, "seer-moonlight", {"divided, speculating": 0.15}),
    ]


def s4b(seeds: int, processes: int) -> list[Row]:
    cells = run("s4b-kimi-k2", seeds, SEER, processes)
    return [
        *ordered("S4b", cells, "seer-k2", ("12202", 10_372, 14_032), 1.16, 1.27),
        *speculating("S4b", cells, "seer-k2", 1.26, 1.53),
        *tails("S4b", cells, "seer-k2", {"divided, speculating": 0.27}),
    ]


SEER = ("synchronous", "synchronous, speculating", "divided, no order", "divided", "divided, speculating")
"""Policies of the studies after Seer: without and with division, its order, and its speculation."""


def ordered(
    scenario: str,
    cells: Sequence[Cell],
    workload: str,
    seconds: tuple[str, float, float],
    unordered: float,
    gain: float,
) -> list[Row]:
    """The synchronous rollout, to which `slow` was fitted, and division against it, without and with Seer's order: what Seer
    reports, and for the first the tolerance."""
    fitted, (paper_s, least_s, most_s) = mean(cells, "synchronous", "rollout_s"), seconds
    rows = [Row(f"{scenario} synchronous rollout, s (fitted)", paper_s, fitted, least_s, most_s, "{:.0f}")]
    for policy, paper in (("divided, no order", unordered), ("divided", gain)):
        found = ratio(cells, workload, policy, "rollout_s")
        check = f"{scenario} {DIVIDED[policy]}, rollout, times as fast"
        rows.append(Row(check, f"{paper:.2f}", found, paper - 0.10, paper + 0.10))
    return rows


def speculating(
    scenario: str, cells: Sequence[Cell], workload: str, alone: float, divided: float
) -> list[Row]:
    """Against the synchronous rollout without drafts: with drafts from each answer alone, and from its group in Seer's order.
    `alone` and `divided`: what Seer reports."""
    rows = []
    for policy, paper, name in (
        ("synchronous, speculating", alone, "speculating"),
        ("divided, speculating", divided, DIVIDED["divided, speculating"]),
    ):
        found = ratio(cells, workload, policy, "rollout_s")
        if (scenario, policy) == ("S3", "divided, speculating"):
            name += " (fitted)"
        rows.append(
            Row(
                f"{scenario} {name}, rollout, times as fast",
                f"{paper:.2f}",
                found,
                paper - 0.15,
                paper + 0.15,
            )
        )
    return rows


def tails(scenario: str, cells: Sequence[Cell], workload: str, papers: Mapping[str, float]) -> list[Row]:
    """Seconds of the last tenth of the rollouts, by those of the synchronous rollout without drafts."""
    rows = []
    for policy, paper in papers.items():
        found = ratio(cells, workload, "synchronous", "tail_s", policy)
        check = f"{scenario} {DIVIDED[policy]}, tail by that of the synchronous rollout"
        rows.append(Row(check, f"{paper:.2f}", found, max(0.0, paper - 0.15), paper + 0.15))
    return rows


DIVIDED = {
    "divided, no order": "`divided` without an order",
    "divided": "`divided`",
    "divided, speculating": "`divided`, speculating from the group",
}
"""How the rows call policies."""

TOOLS_S = (1.0, 6.0, 30.0, 120.0)
"""Medians of the slow tools of S5."""


def rules(scenario: str, table: caps.Table) -> list[Row]:
    rows = []
    for rule, ratios in table.ratios.items():
        ours = rule == "predictive"
        name = f"`{rule}`, by {table.yardstick}" if ours else f"the same, {rule}"
        rows.append(
            Row(f"{scenario} {name}", "", confidence(ratios), *((0.97, 9.0) if ours else ()), form="{:.3f}")
        )
    return rows


def s5(seeds: int, processes: int) -> list[Row]:
    rows: list[Row] = []
    ours: list[caps.Seen] = []
    best: list[caps.Seen] = []
    for tool_s in TOOLS_S:
        table = caps.stationary(tool_s, seeds, processes)
        rows += rules(f"S5 tools of {tool_s:g} s:", table)
        ours += table.seen["predictive"]
        best += table.base
    return [
        *rows,
        Row("S5 `predictive`, longest ramp, s", "", (max(seen.ramp_s for seen in ours), None), 0, 180, "{:.0f}"),
        Row("S5 `predictive`, most tokens lost to it, share", "", (max(seen.wasted for seen in ours), None), 0.0, 0.003, "{:.4f}"),
        Row("S5 `predictive`, most tokens lost to the bound on staleness, share", "", (max(seen.stale for seen in ours), None), form="{:.4f}"),
        Row("S5 the best fixed caps, the same", "", (max(seen.stale for seen in best), None), form="{:.4f}"),
    ]  # fmt: skip


def s6(seeds: int, processes: int) -> list[Row]:
    return rules("S6 turns from 8 to 48 in 4 h:", caps.drifting(seeds, processes))


def s8(seeds: int, processes: int) -> list[Row]:
    kinds = ("whole", "split")
    caps_of = {kind: [f"{kind}, fixed {cap}" for cap in (16, 24, 32, 48)] for kind in kinds}
    policies = [name for kind in kinds for name in (*caps_of[kind], f"{kind}, predictive")]
    cells = run("s8-split", seeds, policies, processes, skip_seconds=600)

    def goodput(policy: str) -> float:
        return mean(cells, policy, "ended_per_s")[0]

    best = {kind: max(caps_of[kind], key=goodput) for kind in kinds}
    rows = [
        Row(f"S8 split in pairs, best fixed cap {cap(best['split'])}, by whole engines at theirs, {cap(best['whole'])}",
            "", by(cells, best["split"], best["whole"])),
    ]  # fmt: skip
    for kind in kinds:
        found = by(cells, f"{kind}, predictive", best[kind])
        rows.append(
            Row(f"S8 {kind}: `predictive`, by its best fixed cap", "", found, 0.97, 9.0, form="{:.3f}")
        )
    return rows


def cap(policy: str) -> str:
    return policy.rpartition(" ")[2]


def by(cells: Sequence[Cell], ours: str, base: str) -> tuple[float, float]:
    """Goodput of one policy by that of another, seed by seed."""
    return ratio(cells, cells[0].workload, base, "ended_per_s", ours)


SCENARIOS: dict[str, Callable[[int, int], list[Row]]] = {
    "S10": s10,
    "memory": memory,
    "time between tokens": lambda seeds, processes: latencies(),
    "S1": s1,
    "S1b": s1b,
    "S2": s2,
    "S3": s3,
    "S4": s4,
    "S4b": s4b,
    "S5": s5,
    "S6": s6,
    "S8": s8,
}
"""By what their rows begin with."""

HEAD = "| check | paper | simulated | seeds | tolerance | verdict |\n| --- | --- | --- | --- | --- | --- |"


def written(page: str) -> dict[str, list[str]]:
    """The lines that the page has of each scenario."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")]
    return {name: [line for line in lines if re.match(rf"\| {name}\b", line)] for name in SCENARIOS}


def main() -> None:
    parser = argparse.ArgumentParser(description="what papers report of scheduling, simulated")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--only", action="append", choices=SCENARIOS, help="a scenario; may be repeated")
    args = parser.parse_args()
    for name in args.only or SCENARIOS:
        made = [row.line(args.seeds) for row in SCENARIOS[name](args.seeds, args.processes)]
        print("\n".join(made), flush=True)
        # One by one, so that what took an hour is not lost to what fails behind it.
        page = PAGE.read_text(encoding="utf-8")
        lines = written(page) | {name: made}
        rows = "\n".join(line for scenario in SCENARIOS for line in lines[scenario])
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{HEAD}\n{rows}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
