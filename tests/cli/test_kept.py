"""A run's journal, kept in one small file, is a test of later releases."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import pytest

from paceline.cli.cores import facts_of
from paceline.cli.main import main
from paceline.config import RunConfig
from paceline.config.load import load
from paceline.core.setup import core_setup
from paceline.domain import commands as do
from paceline.errors import WireError
from paceline.journal import FileJournal, Record
from paceline.journal.kept import kept_start, read_about, write_records
from paceline.testing import World, chaos, replays

ASSET = Path(__file__).parents[1] / "assets" / "two_lives.kept"
ASSET_RUN = """
[run]
name = "a"
max_steps = 12
seed = 3
[model]
name = "pkg:paceline/assets/small_policy"
[sampling]
max_tokens = 16
[[env]]
id = "reverse-text"
group_size = 4
[[env]]
id = "guess-number"
group_size = 4
limits = { max_turns = 4 }
[[eval]]
id = "reverse-text"
examples = 8
every = 4
[engine]
kv_tokens = 2048
max_num_seqs = 16
[admission]
type = "adaptive"
[batch]
rollouts = 16
seq_len = 256
micro_batch_tokens = 2048
[trainer]
lr = 5e-4
[checkpoint]
every = 3
"""
CONFIG = """
[run]
max_steps = 4
[model]
name = "pkg:paceline/assets/small_policy"
[[env]]
id = "arithmetic"
name = "sums"
args = { seed = 31337 }
group_size = 3
[admission]
cap = 6
[batch]
rollouts = 6
seq_len = 64
[sampling]
max_tokens = 12
[services]
judge = "of_nobody:asked"
"""


def recorded(run_dir: Path, steps: int = 4) -> list[Record]:
    """A run of that config in a scripted world."""
    run_dir.mkdir()
    (run_dir / "config.toml").write_text(CONFIG.replace("max_steps = 4", f"max_steps = {steps}"))
    config = load(RunConfig, [run_dir / "config.toml"]).value
    setup = core_setup(
        config, {("train", "sums"): None}, {"sums": asyncio.run(facts_of(config))[0].fingerprint}
    )
    trace = World(setup, chaos(2, failures=0.3), cap=6).run()

    async def write() -> None:
        journal = FileJournal(run_dir, "test")
        for at, event, commands in trace.journal:
            journal.append(at, event, commands)
        await journal.close()

    asyncio.run(write())
    return [Record(n, *entry) for n, entry in enumerate(trace.journal)]


def test_a_run_that_was_killed_and_went_on_is_still_decided_as_it_was(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Kept by `python tests/cli/test_kept.py`. When decisions change on purpose, it is kept again."""
    records = replays(ASSET)
    assert main(["replay", str(ASSET)]) == 0
    assert capsys.readouterr().out == f"{records} records of 2 lives, no divergence\n"


def test_a_kept_journal_needs_no_environment_and_holds_no_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    records, kept = recorded(tmp_path / "run"), tmp_path / "sums.kept"
    assert main(["replay", str(tmp_path / "run"), "--keep", str(kept)]) == 0
    assert f"kept {len(records)} records of 1 life" in capsys.readouterr().out
    for word in (b"31337", b"of_nobody", b"small_policy", bytes(tmp_path)):
        assert word not in read_about(kept)

    async def none_to_be_had(*_: object, **__: object) -> None:
        raise AssertionError("an environment was made")

    monkeypatch.setattr("paceline.cli.environments.environment_of", none_to_be_had)
    assert replays(kept) == len(records)
    assert main(["replay", str(kept), "--batches"]) == 2
    assert "is a kept journal, which has no tokens" in capsys.readouterr().err


def forged(kept: Path, records: Iterable[Record]) -> Path:
    """Another file of these records, that says of itself what `kept` says."""
    path = kept.with_suffix(".forged")
    with path.open("wb") as file:
        file.write(kept_start("test", read_about(kept)))
        write_records(file, records, 1 << 20)
    return path


def test_what_is_decided_otherwise_is_told_and_not_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records, kept = recorded(tmp_path / "run"), tmp_path / "sums.kept"
    assert main(["replay", str(tmp_path / "run"), "--keep", str(kept)]) == 0
    at = next(r for r in records if any(isinstance(c, do.StartRollout) for c in r.commands))
    commands = (*at.commands[:-1], msgspec.structs.replace(at.commands[-1], reason="because"))
    false = forged(kept, [r if r.seq != at.seq else r._replace(commands=commands) for r in records])
    with pytest.raises(AssertionError, match=rf"record {at.seq}, at .*(.|\n)*because"):
        replays(false)
    assert main(["replay", str(false)]) == 1
    (tmp_path / "run" / "config.toml").write_text(CONFIG.replace("cap = 6", "cap = 5"))
    capsys.readouterr()
    assert main(["replay", str(tmp_path / "run"), "--keep", str(tmp_path / "other.kept")]) == 1
    assert "is decided otherwise" in capsys.readouterr().out
    assert not (tmp_path / "other.kept").exists()


def test_a_kept_journal_that_is_cut_off_is_refused_wherever_it_is_cut(tmp_path: Path) -> None:
    records, kept = recorded(tmp_path / "run"), tmp_path / "sums.kept"
    assert main(["replay", str(tmp_path / "run"), "--keep", str(kept)]) == 0
    whole = kept.read_bytes()
    for length in range(0, len(whole), len(whole) // 29):
        kept.write_bytes(whole[:length])
        with pytest.raises((WireError, AssertionError)):
            replays(kept)
    kept.write_bytes(whole)
    with pytest.raises(WireError, match="it is cut off"):  # between two frames
        replays(forged(kept, records[:-1]))
    log = tmp_path / "run" / "journal" / "000001.log"
    with pytest.raises(WireError, match="no kept journal"):
        replays(log)


def test_of_a_long_run_the_first_records_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records, kept = recorded(tmp_path / "run", steps=30), tmp_path / "begin.kept"
    assert main(["replay", str(tmp_path / "run"), "--keep", str(kept), "--keep-mb", "0.03"]) == 0
    assert f"(the first of {len(records)}; --keep-mb takes more)" in capsys.readouterr().out
    assert kept.stat().st_size < 40_000
    assert 500 < replays(kept) < len(records)
    assert main(["replay", str(tmp_path / "run"), "--keep", str(kept), "--keep-mb", "0.0001"]) == 2
    assert "raise --keep-mb" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--keep", "{place}/pipe"], "pipe: a file is written, so name one"),
        (["--keep", "{place}"], ": a file is written, so name one"),
        (["--keep", ""], "a file is written, so name one"),
        (["--keep", "{place}/nowhere/x.kept"], "in a folder that is there"),
        (["--keep", "{place}/x.kept", "--keep-mb", "nan"], "'nan' is no number of megabytes above 0"),
        (["--keep", "{place}/x.kept", "--batches"], "give one of them"),
    ],
)
def test_what_cannot_be_kept_there_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert main(["replay", str(tmp_path), *(word.format(place=tmp_path) for word in words)]) == 2
    assert says in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["pipe"]


def test_what_is_no_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(tmp_path / "nope")]) == 2
    assert "is neither a run's directory nor a file that --keep made" in capsys.readouterr().err
    (tmp_path / "journal" / "000001.log").mkdir(parents=True)
    assert main(["replay", str(tmp_path), "--keep", str(tmp_path / "x.kept")]) == 1
    assert "000001.log cannot be read: Is a directory" in capsys.readouterr().err


def _keep_asset(root: Path) -> None:
    config = root / "a.toml"
    config.write_text(ASSET_RUN)
    command = [sys.executable, "-m", "paceline", "run", str(config), "--plain", f"--run.dir={root}"]
    first = subprocess.Popen(command)
    while not (root / "a" / "acks" / "step_000005.json").exists():
        assert first.poll() is None
        time.sleep(0.1)
    first.kill()
    first.wait()
    subprocess.run([*command, "--resume", str(root / "a")], check=True)
    assert main(["replay", str(root / "a"), "--keep", str(ASSET)]) == 0


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        _keep_asset(Path(folder))
