"""Kept journals as tests: see `docs/kept.md`."""

from __future__ import annotations

from pathlib import Path


def replays(path: Path | str) -> int:
    """Check that this release decides a kept journal as it was decided; the number of records.

    AssertionError tells the first record that is decided otherwise: its event, the command that was expected, the one that was
    found. Also where fewer can be decided again than when it was kept.
    """
    from paceline.cli.kept import KeptRun
    from paceline.cli.replay import decided_again, told

    report = decided_again(Path(path))
    decided = KeptRun(Path(path)).about.decided
    assert report.divergence is None, f"{path}: {told(report)}"
    assert report.records == decided, (
        f"{path}: {decided} records could be decided again when it was kept: {told(report)}"
    )
    return report.records
