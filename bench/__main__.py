"""Run benchmarks, print a table, append to `bench/results.jsonl`.

Each module of this package offers `rows() -> list[dict]` with name, value, unit, target (None for none), ok (None
where there is no target) and a note. `--only WORD` runs the modules, or keeps the rows, whose name contains WORD.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import platform
import sys
import time
from pathlib import Path
from typing import Any

import bench

RESULTS = Path(__file__).with_name("results.jsonl")


def machine() -> str:
    """Processor, cores and Python: what a number was measured on."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def modules(only: str | None) -> list[str]:
    """Modules that offer rows; with `only`, those that declare a row or are themselves named like it."""
    names = sorted(m.name for m in pkgutil.iter_modules(bench.__path__) if not m.name.startswith("_"))
    if only is None:
        return [name for name in names if _left_out(name) is None]
    chosen = []
    for name in names:
        declared = getattr(importlib.import_module(f"bench.{name}"), "ROWS", ())
        if only in name or any(only in row for row in declared):
            chosen.append(name)
    return chosen


def _left_out(name: str) -> str | None:
    """Why a module is run only when it is named; None when it is one of all."""
    reason: str | None = getattr(importlib.import_module(f"bench.{name}"), "ONLY_BY_NAME", None)
    if reason is not None:
        print(f"{name} is left out: {reason}; run it by its name", file=sys.stderr)
    return reason


def show(row: dict[str, Any]) -> str:
    mark = {True: "ok", False: "MISSED", None: ""}[row["ok"]]
    target = "" if row["target"] is None else f"{row['target']:g}"
    return f"{row['name']:<34} {row['value']:>12.4g} {row['unit']:<12} {target:>9}  {mark:<7} {row['note']}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", metavar="WORD", help="modules or rows whose name contains this")
    only = parser.parse_args().only
    chosen = modules(only)
    if not chosen:
        print(f"no benchmark is called anything like {only!r}; there are: {', '.join(modules(None))}")
        return 2
    where = machine()
    print(f"{'name':<34} {'value':>12} {'unit':<12} {'target':>9}\n", flush=True)
    missed = 0
    for name in chosen:
        for row in importlib.import_module(f"bench.{name}").rows():
            if only and only not in name and only not in row["name"]:
                continue
            print(show(row), flush=True)
            missed += row["ok"] is False
            with RESULTS.open("a") as file:
                file.write(
                    json.dumps({**row, "machine": where, "at": time.strftime("%Y-%m-%dT%H:%M:%S")}) + "\n"
                )
    print(f"\n{where}; written to {RESULTS.name}" + (f"; {missed} missed their target" if missed else ""))
    return 0


if __name__ == "__main__":
    sys.exit(main())
