"""The final status of a run: always written, once, and in agreement with the exit code."""

from __future__ import annotations

import asyncio

import pytest

from paceline.errors import ConfigError, EngineError
from paceline.runtime.status import FinalState, FinalStatus, describe


class Written(list[tuple[FinalState, str]]):
    def __call__(self, state: FinalState, reason: str) -> None:
        self.append((state, reason))


@pytest.mark.parametrize("where", ["set-up", "step 3", "during save", "during finalise"])
def test_s81_a_failure_anywhere_is_the_final_status_with_its_reason(where: str) -> None:
    written = Written()
    with pytest.raises(RuntimeError), FinalStatus(written) as status:
        raise RuntimeError(f"failed at {where}")
    assert written == [("failed", f"RuntimeError: failed at {where}")]
    assert (status.state, status.exit_code) == ("failed", 1)


@pytest.mark.parametrize("state", ["done", "stopped"])
def test_s81_success_and_a_stop_exit_with_zero(state: FinalState) -> None:
    written = Written()
    with FinalStatus(written) as status:
        assert status.finish(state, "because") == 0
    assert written == [(state, "because")]


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, asyncio.CancelledError])
def test_s81_an_interrupt_is_a_stop(interrupt: type[BaseException]) -> None:
    written = Written()
    with pytest.raises(interrupt), FinalStatus(written) as status:
        raise interrupt
    assert (written, status.exit_code) == ([("stopped", "interrupted")], 0)


def test_s81_the_first_final_status_stands_and_is_written_once() -> None:
    written = Written()
    with pytest.raises(OSError, match="late"), FinalStatus(written) as status:  # noqa: PT012
        assert status.finish("failed", "the trainer died") == 1
        assert status.finish("done", "all steps") == 1
        raise OSError("late")
    assert written == [("failed", "the trainer died")]


def test_s81_a_success_that_cannot_be_recorded_is_a_failure() -> None:
    def full(_state: FinalState, _reason: str) -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"), FinalStatus(full) as status:
        status.finish("done", "all steps")
    assert status.exit_code == 1


def test_s81_a_status_that_cannot_be_written_does_not_hide_why_the_run_failed() -> None:
    def full(_state: FinalState, _reason: str) -> None:
        raise OSError("no space left on device")

    with pytest.raises(EngineError, match="lost"), FinalStatus(full):
        raise EngineError("engine e0 is lost")


def test_a_run_that_ends_without_a_word_has_failed() -> None:
    written = Written()
    with FinalStatus(written):
        pass
    assert written[0][0] == "failed"


def test_a_config_error_has_an_exit_code_of_its_own() -> None:
    written = Written()
    assert FinalStatus(written).fail(ExceptionGroup("tasks", [ConfigError("env.id is unknown")])) == 2
    assert written == [("failed", "env.id is unknown")]


def test_a_cause_is_told_with_its_error() -> None:
    error = EngineError("engine e0 is lost")
    error.__cause__ = OSError("no route to host")
    assert describe(error) == "engine e0 is lost (because of OSError: no route to host)"
