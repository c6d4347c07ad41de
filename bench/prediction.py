"""How well a simulation on fitted engines tells what they do under loads that they were not fitted to.

`pinned`: rollouts alone, the engine on a core of its own (`bench/_pinned.py`). `whole`: runs of the examples with the reference
trainer, all on the same cores (`bench/_whole.py`). Both times loads are run on the real engine to fit a model to, others to be told,
and goodput of the real ones is compared with that of a simulation of the same rollouts. What was measured, and what comes of
it, is in docs/benchmarks/prediction.md.

    make bench ONLY=prediction                           the rows, and the tables; three quarters of an hour
    python -m bench.prediction pinned --engine embedded  one table
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from bench import _pinned, _whole
from bench.vllm_admission import VLLM
from paceline.sim.calibrate import Calibration, calibrate

ONLY_BY_NAME = (
    "it takes three quarters of an hour, a quiet machine with two cores, and a real vLLM (make vllm-env)"
)
ENGINES = ("embedded", "vllm")
TARGETS = {"pinned": 0.10, "whole": 0.15}
ROWS = tuple(f"prediction_{engine}" for engine in ENGINES) + tuple(
    f"prediction_whole_{engine}" for engine in ENGINES
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one load, or of one run."""

    name: str
    real: float
    """Tokens a second."""
    predicted: float
    note: str
    """What else was seen of the real one."""

    @property
    def error(self) -> float:
        return self.predicted / self.real - 1


def pinned(engine: str) -> tuple[Calibration, list[Prediction]]:
    """What was fitted, and what it tells of other loads."""
    seen = _pinned.observed(engine)
    fitted = calibrate(seen.records, _pinned.BATCHED[engine])
    return fitted, [_told(fitted, engine, name, seen.cells[name]) for name in _pinned.HELD_OUT]


def _told(
    fitted: Calibration, engine: str, name: str, runs: Sequence[tuple[_pinned.Load, Mapping[str, float]]]
) -> Prediction:
    """One load, all its runs together."""
    means = {key: fmean(cell[key] for _, cell in runs) for key in ("goodput", "cores", "starved")}
    return Prediction(
        name,
        means["goodput"],
        fmean(_pinned.simulated(fitted, engine, load) for load, _ in runs),
        f"{means['cores']:.2f} cores, {means['starved']:.0%} of the time without one",
    )


def whole(engine: str) -> tuple[Calibration, list[Prediction]]:
    """The same of whole runs."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        fit, runs = _whole.runs(engine, Path(folder))
    records = [record for run in fit for record in run.records]
    return calibrate(records, _pinned.BATCHED[engine]), [
        Prediction(name, run.goodput, _whole.simulated(records, run), f"{run.cores:.2f} cores")
        for name, run in runs.items()
    ]


MEASURED = {"pinned": pinned, "whole": whole}


def table(fitted: Calibration, found: Sequence[Prediction]) -> str:
    lines = [
        "| | real, tok/s | simulated | error | |",
        "| --- | --- | --- | --- | --- |",
        *(f"| {p.name} | {p.real:.0f} | {p.predicted:.0f} | {p.error:+.1%} | {p.note} |" for p in found),
        "",
        "| a step, ms | a sequence, µs | a token of context, µs | read again, µs | pads | a prompt token, µs | a token before it, ns | a request, ms |",
        "|" + " --- |" * 8,
        f"| {1e3 * fitted.fixed_s:.1f} | {1e6 * fitted.seq_s:.0f} | {1e6 * fitted.context_s:.2f} | {1e6 * fitted.again_s:.2f} | {'yes' if fitted.pads else 'no'} "
        f"| {1e6 * fitted.token_s:.0f} | {1e9 * fitted.attention_s:.0f} | {1e3 * fitted.request_s:.1f} |",
    ]
    return "\n".join(lines)


def row(name: str, found: Sequence[Prediction], target: float) -> dict[str, Any]:
    """The worst of what was predicted."""
    worst = max(found, key=lambda each: abs(each.error))
    note = f"worst: {worst.name}, {worst.predicted:.0f} told, {worst.real:.0f} tokens/s seen"
    return {"name": name, "value": abs(worst.error), "unit": "off", "target": target} | {
        "ok": abs(worst.error) <= target,
        "note": note,
    }


def rows() -> list[dict[str, Any]]:
    made = []
    for part, measure in MEASURED.items():
        for engine in ENGINES:
            if engine == "vllm" and not VLLM.exists():
                print("prediction: vLLM is left out, there is none: make vllm-env", file=sys.stderr)
                continue
            fitted, found = measure(engine)
            print(f"{part}, {engine}\n\n{table(fitted, found)}\n", file=sys.stderr)
            name = f"prediction_{engine}" if part == "pinned" else f"prediction_whole_{engine}"
            made.append(row(name, found, TARGETS[part]))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.prediction", description=__doc__)
    parser.add_argument("part", choices=list(MEASURED))
    parser.add_argument("--engine", choices=ENGINES, default="embedded")
    args = parser.parse_args()
    print(table(*MEASURED[args.part](args.engine)))


if __name__ == "__main__":
    main()
