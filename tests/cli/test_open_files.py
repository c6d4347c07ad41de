"""How many files and connections a run may have open."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from paceline.cli.open_files import MOST

LIMITED = """
import resource, sys
from paceline.cli.open_files import allow_open_files
resource.setrlimit(resource.RLIMIT_NOFILE, tuple(map(int, sys.argv[1:])))
print(allow_open_files(), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""
DOCTOR = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]),) * 2)
from paceline.cli.main import main
sys.exit(main(["doctor", *sys.argv[2:]]))
"""


def limited(soft: int, hard: int) -> list[int]:
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(soft), str(hard)], capture_output=True, text=True, check=True
    )
    return [int(word) for word in done.stdout.split()]


def test_the_limit_is_raised_as_far_as_it_may_and_never_lowered() -> None:
    assert limited(64, 300) == [300, 300, 300]
    assert limited(300, 300) == [300, 300, 300]
    assert MOST > 10_000


def doctor(tmp_path: Path, limit: int, *words: str) -> str:
    config = tmp_path / "run.toml"
    config.write_text('[model]\nname = "pkg:paceline/assets/small_policy"\n[[env]]\nid = "reverse-text"\n')
    command = [sys.executable, "-c", DOCTOR, str(limit), str(config), "--run.dir", str(tmp_path), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout


def test_the_doctor_tells_both_numbers_and_what_to_do(tmp_path: Path) -> None:
    few = doctor(tmp_path, 100, "--admission.cap", "40", "--engine.replicas", "2")
    assert "100 allowed, 208 needed with 80 calls in flight" in few
    assert "raise the limit, with `ulimit -Hn`" in few
    assert "FAIL" in few
    some = doctor(tmp_path, 180, "--admission.cap", "40", "--engine.replicas", "2")
    assert "FAIL" not in some
    assert "180 allowed, 208 needed" in some
    enough = doctor(tmp_path, 400, "--admission.type", "predictive")
    assert "open files: 400 allowed, at least 192 needed" in enough


CLOSED = """
import os, sys
for number in map(int, sys.argv[2]):
    os.close(number)
os.execv(sys.executable, [sys.executable, "-m", "paceline", *sys.argv[3:], "--out", sys.argv[1]])
"""


def test_without_standard_streams_files_do_not_take_their_numbers(tmp_path: Path) -> None:
    """What a command prints would be written into the first files that it opens."""
    study = tmp_path / "study.toml"
    study.write_text(
        '[study]\nname = "s"\nseeds = 1\nsteps = 1\n[batch]\nrollouts = 8\n[[workload]]\nname = "w"\n'
        '[[workload.env]]\npreset = "code-single"\n[[policy]]\nname = "p"\n'
    )
    for streams in ("1", "12", "012"):
        out = tmp_path / streams
        command = [sys.executable, "-c", CLOSED, str(out), streams, "simulate", str(study)]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        (table,) = out.glob("*.csv")
        assert table.read_text().startswith("policy,")
        assert (out / "s.html").read_text().rstrip().endswith("</html>")
