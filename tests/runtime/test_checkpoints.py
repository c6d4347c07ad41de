"""A checkpoint of the core is what its name and its place say, or it is not gone on from."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from paceline.errors import WireError
from paceline.runtime.checkpoints import Checkpoints


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    core = Checkpoints(tmp_path, 3, "run-1")
    core.save(8, {"cut": 8, "seq": 70})
    assert core.load(8) == {"cut": 8, "seq": 70}
    assert Checkpoints(tmp_path, 3).load(8) == {"cut": 8, "seq": 70}, "of whichever run"


def test_a_copy_under_another_steps_name_is_passed_over_with_a_note(tmp_path: Path) -> None:
    core = Checkpoints(tmp_path, 3, "run-1")
    core.save(8, {"cut": 8})
    shutil.copy(tmp_path / "step_000008.ckpt", tmp_path / "step_000999.ckpt")
    assert core.newest_usable() == (
        8,
        {"cut": 8},
        [f"{tmp_path}/step_000999.ckpt holds step 8, not the one in its name: remove it"],
    )


def test_a_checkpoint_of_another_run_is_refused_and_one_that_does_not_say_is_not(tmp_path: Path) -> None:
    Checkpoints(tmp_path, 3, "run-1").save(8, {"cut": 8})
    with pytest.raises(
        WireError, match=r"step_000008.ckpt is of run 'run-1', this is run 'run-2': remove it"
    ):
        Checkpoints(tmp_path, 3, "run-2").newest_usable()
    Checkpoints(tmp_path, 3).save(9, {"cut": 9})  # as earlier releases wrote it
    found = Checkpoints(tmp_path, 3, "run-2").newest_usable()
    assert found is not None
    assert found[0] == 9
