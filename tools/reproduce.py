"""Reproduce what papers report of rollout scheduling, with the production core on modelled engines; `make reproduce`.

Writes the table of `docs/benchmarks/scheduling.md` between its markers. Each ratio is of paired seeds; only a baseline's
absolute time was fitted (one factor a scenario, `slow` in its study).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.cli.studies import simulate
from paceline.sim.bound import tail_probability
from paceline.sim.cells import Cell, paired, spread
from paceline.sim.engine import GPUS, MODELS, speed_of
from paceline.sim.metrics import confidence
from paceline.sim.study import StudyConfig, load_study

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks" / "scheduling.md"
BEGIN, END = "<!-- reproduction -->", "<!-- /reproduction -->"

LATENCIES = (
    ("qwen2.5-7b", 1, 10.6, 750, 251, 7.02),
    ("qwen2.5-7b", 1, 10.7, 1034, 1448, 7.45),
    ("llama-2-7b", 1, 9.1, 566, 247, 9.26),
    ("llama-2-7b", 1, 22.2, 566, 247, 11.23),
    ("llama-2-7b", 1, 17.1, 1034, 1448, 15.20),
    ("mistral-nemo-12b", 1, 12.2, 566, 247, 9.86),
    ("mistral-nemo-12b", 1, 26.3, 566, 247, 10.58),
    ("llama-3.1-70b", 4, 10.5, 547, 248, 17.08),
    ("llama-3.1-70b", 4, 27.7, 547, 248, 18.80),
)
"""Model, GPUs, requests at once, prompt, sampled tokens, measured ms between tokens (vLLM 0.15.1 on H100)."""


class Row:
    """One line: what was checked, what the paper has, what we have."""

    def __init__(
        self,
        check: str,
        paper: str,
        value: tuple[float, float],
        low: float,
        high: float,
        form: str = "{:.2f}",
    ) -> None:
        self.check, self.paper, self.low, self.high = check, paper, low, high
        self.value, self.half = value
        self.form = form

    def line(self) -> str:
        ours = self.form.format(self.value)
        half = f" ± {self.form.format(self.half)}" if self.half else ""
        allowed = f"{self.form.format(self.low)} to {self.form.format(self.high)}"
        verdict = "holds" if self.low <= self.value <= self.high else "**misses**"
        return f"| {self.check} | {self.paper} | {ours}{half} | {allowed} | {verdict} |"


def latencies() -> list[Row]:
    """The engine model against measured times between tokens: decode with the mean context, alone."""
    errors = []
    for model, gpus, batch, prompt, sampled, measured in LATENCIES:
        speed = speed_of(MODELS[model], GPUS["H100"], gpus=gpus)
        step = speed.gemm_s(round(batch), batch) + speed.overhead_s + batch * speed.seq_s
        step += speed.kv_s * batch * (prompt + sampled / 2)
        # Each request's prefill stalls the others once in its lifetime.
        stall = speed.prefill_s(0, prompt) * batch / sampled
        errors.append(abs(1000 * (step + stall) / measured - 1))
    mean_error = sum(errors) / len(errors)
    return [
        Row("time between tokens, mean error of 9 points", "measured", (mean_error, 0.0), 0.0, 0.10, "{:.3f}")
    ]


def run(name: str, seeds: int, policies: Sequence[str], processes: int) -> list[Cell]:
    study = load_study(ROOT / "examples" / "studies" / f"{name}.toml")
    data = study.model_dump()
    data["study"] |= {"seeds": seeds, "sample_s": None}
    data["policy"] = [policy for policy in data["policy"] if policy["name"] in policies]
    return simulate(StudyConfig.model_validate(data), processes=processes)


def ratio(cells: Sequence[Cell], workload: str, policy: str, name: str) -> tuple[float, float]:
    found = paired(cells, policy, "synchronous", name, workload)
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


def table(seeds: int, processes: int) -> list[Row]:
    s1 = run(
        "s1-rollpacker-16k",
        seeds,
        ("synchronous", "tail-rounds", "overprovision-discard", "partial-2x", "overlap-2"),
        processes,
    )
    s2 = run("s2-rollpacker-32k", seeds, ("synchronous", "tail-rounds"), processes)
    s3 = run("s3-seer-qwen-vl", seeds, ("synchronous",), processes)
    return [
        Row("S10: batches of 128 with one of the 2%", "93%", (tail_probability(0.02, 128), 0.0), 0.9245, 0.9255, "{:.4f}"),
        *latencies(),
        Row("S1 synchronous rollout, s (fitted)", "277", mean(s1, "synchronous", "rollout_s"), 235, 319, "{:.0f}"),
        Row("S1 tail rounds, rollout, times as fast", "3.15", ratio(s1, "rp-16k", "tail-rounds", "rollout_s"), 2.68, 3.62),
        Row("S1 tail rounds, mean length trained", "claims 0", mean(s1, "tail-rounds", "length_mean"), -0.40, -0.26),
        Row("S1 race without keeping, mean length trained", "", mean(s1, "overprovision-discard", "length_mean"), -0.45, -0.30),
        Row("S1 partial, twice over-issued: most versions", "at most 5", mean(s1, "partial-2x", "versions_max"), 1, 5, "{:.1f}"),
        Row("S1 overlap, lag 2, step, times as fast", "", ratio(s1, "rp-16k", "overlap-2", "step_s"), 2.0, 4.5),
        Row("S2 synchronous rollout, s (fitted)", "673", mean(s2, "synchronous", "rollout_s"), 572, 774, "{:.0f}"),
        Row("S2 tail rounds, rollout, times as fast", "3.96", ratio(s2, "rp-32k", "tail-rounds", "rollout_s"), 3.37, 4.55),
        Row("S3 synchronous rollout, s (fitted)", "3957", mean(s3, "synchronous", "rollout_s"), 3363, 4551, "{:.0f}"),
        Row("S3 preemptions", "13,686", mean(s3, "synchronous", "preemptions"), 11_633, 15_739, "{:.0f}"),
        Row("S3 tail, share of the rollout", "0.58", derived(s3, "synchronous", lambda n: n["tail_s"] / n["rollout_s"]), 0.46, 0.70),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    rows = table(args.seeds, args.processes)
    head = ["| check | paper | simulated | tolerance | verdict |", "| --- | --- | --- | --- | --- |"]
    made = "\n".join([f"{args.seeds} paired seeds.", "", *head, *(row.line() for row in rows)])
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    print(made)


if __name__ == "__main__":
    main()
