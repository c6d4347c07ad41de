"""Plant known faults one after the other, and see which seed of the storm finds each.

    python tools/plant_faults.py                      # the table of docs/chaos.md, written anew
    python tools/plant_faults.py --only waits --first 1 --seeds 1

A fault is some text of the source, replaced in a copy of it in a temporary directory; the tree is not touched. The seeds
are then run on the copy until one fails. Ends with 1 if a fault was found by none.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "chaos.md"
BEGIN, END = "<!-- planted: begin -->", "<!-- planted: end -->"
EVENTS = 200


class Fault(NamedTuple):
    says: str
    file: str
    """Below src/paceline/core."""
    changes: tuple[tuple[str, str], ...]
    """Text that must be there once, and what stands there instead."""


FAULTS: dict[str, Fault] = {
    "batch": Fault(
        "a batch that was cut still waits after a kill",
        "recovery_list.py",
        (("(rollout, self._list.pop(rollout)) for", "(rollout, self._list[rollout]) for"),),
    ),
    "attempt": Fault(
        "a failed attempt counts as its member's last one after a kill",
        "recovery.py",
        (
            ("self._ended(event.rollout, event.rollout.id in retried)", "self._ended(event.rollout, False)"),
            ("            do.NoteRetry: self._retried,\n", ""),
        ),
    ),
    "owed": Fault(
        "what was commanded and not answered is forgotten",
        "recovery.py",
        (("            commands.append(do.ProcessGroup(closed, ", "            (do.ProcessGroup(closed, "),),
    ),
    "lost": Fault(
        "tokens that a rollout lost at a restart stay with it after the next",
        "recovery.py",
        (
            (
                "flight.sampled, flight.oldest = event.tokens, event.oldest",
                "flight.oldest = event.oldest",
            ),
        ),
    ),
    "parts": Fault(
        "a rollout goes on with tokens that the journal does not know of",
        "parts.py",
        (
            ("if part.number >= requests:", "if part.number >= requests + 10**9:"),
            ("for part in kept]) > sampled:", "for part in kept]) > sampled + 10**9:"),
        ),
    ),
    "permit": Fault(
        "the permit of a rollout is never given back",
        "fleet.py",
        (
            (
                "        self.in_flight -= 1\n        del self.flights[flight.id]",
                "        del self.flights[flight.id]",
            ),
        ),
    ),
    "sweep": Fault(
        "what grew stale in the batch list is not swept",
        "batching.py",
        (("sorted([v for v in self._by_version if v < oldest])", "()"),),
    ),
    "waits": Fault(
        "a group that waits for a seat is in no record until it starts",
        "launching.py",
        (("        self._out.say(do.NoteOpened(", "        (do.NoteOpened("),),
    ),
    "mix": Fault(
        "the mix does not count groups that an earlier life left open",
        "launching.py",
        (("        self.curriculum.goes_on(group.task.env)\n        self._policy", "        self._policy"),),
    ),
    "drawn": Fault(
        "a task that was drawn is drawn again after a kill",
        "recovery_draws.py",
        (('        saved["drawn"] += 1\n', ""),),
    ),
    "place": Fault(
        "a member that brought nothing keeps its place in batches to come",
        "scheduler.py",
        (
            (
                "self.pacing.taken -= group.places - listed",
                "self.pacing.taken -= max(0, group.places - listed - 1)",
            ),
        ),
    ),
}


class Found(NamedTuple):
    seed: int
    told: str


def find(fault: Fault, first: int, seeds: int) -> Found | None:
    """The first seed that fails with this fault; None when none does. ValueError when the source is not as expected."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__", "assets"))
        path = source / "paceline" / "core" / fault.file
        text = path.read_text()
        for before, after in fault.changes:
            if text.count(before) != 1:
                raise ValueError(
                    f"{fault.file} holds {text.count(before)} times what is replaced: {before!r}"
                )
            text = text.replace(before, after)
        path.write_text(text)
        run = subprocess.run(
            [
                sys.executable,
                "-m",
                "paceline.testing.storm",
                "--stop",
                f"--events={EVENTS}",
                f"--first={first}",
                f"--seeds={seeds}",
            ],
            env={**os.environ, "PYTHONPATH": str(source)},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if (failed := re.search(r"^seed (\d+) failed", run.stdout, re.M)) is None:
        if run.returncode:
            raise RuntimeError(f"the storm itself failed: {run.stderr[-2000:]}")
        return None
    errors = re.findall(r"^[\w.]*(?:Error|Exception)\b.*", run.stderr, re.M)
    return Found(int(failed[1]), errors[-1].removeprefix("paceline.errors.InvariantError: ")[:90])


def written(rows: list[str]) -> str:
    """The page with these rows in its table."""
    page = PAGE.read_text()
    head, rest = page.split(BEGIN)
    tail = rest.split(END)[1]
    table = "\n".join(["| planted | `--only` | seed | found as |", "| --- | --- | --- | --- |", *rows])
    return f"{head}{BEGIN}\n{table}\n{END}{tail}"


def recorded() -> dict[str, int]:
    """Seeds that the page says have found the faults."""
    return {name: int(seed) for name, seed in re.findall(r"\| `(\w+)` \| (\d+) \|", PAGE.read_text())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=FAULTS, help="one fault; the page is left as it is")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--seeds", type=int, default=60, help="most seeds for each")
    args = parser.parse_args()
    rows, missed = [], 0
    for name in [args.only] if args.only else FAULTS:
        fault = FAULTS[name]
        found = find(fault, args.first, args.seeds)
        if found is None:
            missed += 1
            print(f"{name}: {fault.says}: found by none of {args.seeds} seeds", flush=True)
            continue
        again = f"python tools/plant_faults.py --only {name} --first {found.seed} --seeds 1"
        print(f"{name}: {fault.says}: seed {found.seed}: {found.told}; again: {again}", flush=True)
        rows.append(f"| {fault.says} | `{name}` | {found.seed} | {found.told.replace('|', '/')} |")
    if not args.only and not missed:
        PAGE.write_text(written(rows))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
