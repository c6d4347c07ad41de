"""`paceline doctor CONFIG`: what a run needs before it starts, all at once, with the remedy for what is missing."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import textwrap

from paceline.cli.options import add_config_argument, load_config
from paceline.errors import printable
from paceline.runtime.doctor import Finding

TAKES_CONFIG = True

_MARKS = {"ok": "ok", "warning": "warn", "error": "FAIL"}
_COLORS = {"ok": "32", "warning": "33", "error": "31"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_config_argument(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as one JSON line")


def run(args: argparse.Namespace) -> int:
    """0 when the run can start, 2 when something keeps it from working."""
    from paceline.cli.checks import as_json, diagnose

    findings = asyncio.run(diagnose(load_config(args)))
    if args.json:
        print(json.dumps(as_json(findings)))
    else:
        print(render(findings, color=sys.stdout.isatty()))
    return 2 if any(finding.level == "error" for finding in findings) else 0


def render(findings: list[Finding], *, color: bool = False, width: int = 100) -> str:
    """For people: what is wrong first, each with both sides and the remedy, then what is right."""
    lines = []
    for finding in map(_clean, findings):
        mark = f"{_MARKS[finding.level]:<4}"
        if color:
            mark = f"\x1b[{_COLORS[finding.level]}m{mark}\x1b[0m"
        if finding.level == "ok":
            lines.append(f"{mark}  {finding.what}" + (f": {finding.facts}" if finding.facts else ""))
            continue
        lines.append(f"{mark}  {finding.what}")
        for text, begins in ((finding.facts, "      "), (finding.remedy, "      -> ")):
            if text:
                lines += textwrap.wrap(
                    text,
                    width,
                    initial_indent=begins,
                    subsequent_indent=" " * len(begins),
                    break_long_words=False,
                    break_on_hyphens=False,
                )
    errors = sum(finding.level == "error" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    if errors:
        plural = "problem keeps" if errors == 1 else "problems keep"
        lines += ["", f"{errors} {plural} this run from working"]
    else:
        noted = f", with {warnings} warning{'s' * (warnings != 1)}" if warnings else ""
        lines += ["", f"this run can start{noted}"]
    return "\n".join(lines)


def _clean(finding: Finding) -> Finding:
    """Without what would move the cursor: servers and environments are quoted in findings."""
    texts = (printable(text).replace("\n", " ") for text in (finding.what, finding.facts, finding.remedy))
    return Finding(finding.level, *texts)
