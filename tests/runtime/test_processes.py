"""Child processes of a run: ready, dead, ended, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from paceline.errors import EngineError, TrainerError
from paceline.runtime.processes import ChildProcess

READY = 'import time; print(\'{"event": "ready", "url": "http://x"}\', flush=True); '


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def start(code: str, path: Path, **options: Any) -> ChildProcess:
    options = {"name": "engine-0", "log_path": path / "logs" / "engine-0.log", "start_s": 20.0} | options
    return await ChildProcess.start(python(code), **options)


def alive(marker: str) -> list[int]:
    """Processes whose command line holds `marker`, dead ones that nobody has collected left out."""
    return [
        process.pid
        for process in psutil.process_iter(["cmdline", "status"])
        if marker in " ".join(process.info["cmdline"] or ())
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def gone_within(seconds: float, marker: str) -> bool:
    deadline = time.monotonic() + seconds
    while alive(marker):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


async def test_the_ready_line_is_read_and_all_output_is_in_the_log(tmp_path: Path) -> None:
    code = (
        "import sys; print('loading', file=sys.stderr); print('{\"event\": \"other\"}'); "
        + READY
        + "time.sleep(99)"
    )
    async with await start(code, tmp_path) as child:
        assert child.ready == {"event": "ready", "url": "http://x"}
        assert child.exit_code is None
    log = child.log_path.read_text()
    assert "loading" in log
    assert '"ready"' in log
    assert child.exit_code == -signal.SIGTERM


async def test_a_file_may_say_that_a_process_is_ready(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    code = f"import time, pathlib; pathlib.Path({str(flag)!r}).touch(); time.sleep(99)"
    async with await start(code, tmp_path, ready=flag.exists) as child:
        assert child.exit_code is None


async def test_one_that_ends_before_it_is_ready_says_why(tmp_path: Path) -> None:
    code = "import sys; sys.exit('no such model: tiny')"
    with pytest.raises(EngineError, match=r"(?s)engine-0 ended before .*exit code 1.*no such model: tiny"):
        await start(code, tmp_path)


async def test_a_program_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot start /no/such/program"):
        await ChildProcess.start(["/no/such/program"], name="engine-0", log_path=tmp_path / "log")


async def test_one_that_is_never_ready_is_ended_and_the_limit_named(tmp_path: Path) -> None:
    marker = f"late-{os.getpid()}"
    with pytest.raises(EngineError, match=r"not ready within 0.3 s \(start_s\)"):
        await start(f"'{marker}'; import time; time.sleep(99)", tmp_path, start_s=0.3)
    assert gone_within(2, marker)


async def test_a_death_is_an_error_with_the_code_and_the_last_lines(tmp_path: Path) -> None:
    code = READY + "print('out of memory', flush=True); raise SystemExit(3)"
    child = await start(code, tmp_path, name="trainer", error=TrainerError)
    with pytest.raises(TrainerError, match=r"(?s)trainer ended by itself \(exit code 3\).*out of memory"):
        await child.wait_dead()
    await child.close()


async def test_a_death_by_signal_names_the_signal(tmp_path: Path) -> None:
    child = await start(READY + "time.sleep(99)", tmp_path)
    os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(EngineError, match="signal SIGKILL"):
        await child.wait_dead()


async def test_the_number_of_a_group_that_is_gone_is_not_signalled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = await start(READY, tmp_path)
    with pytest.raises(EngineError):
        await child.wait_dead()
    signalled: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, number: signalled.append(group))
    child.kill()
    await child.close()
    assert not signalled, "it may be another program's by now"


async def test_an_end_in_order_is_no_error(tmp_path: Path) -> None:
    child = await start(READY, tmp_path, may_finish=True)
    await child.wait_dead()
    child = await start(READY + "time.sleep(99)", tmp_path)
    waiting = asyncio.ensure_future(child.wait_dead())
    await child.close()
    await waiting
    assert await child.close() == -signal.SIGTERM


async def test_one_that_was_told_elsewhere_may_end_by_itself_before_it_is_asked(tmp_path: Path) -> None:
    code = READY + "time.sleep(0.2); raise SystemExit(0)"
    child = await start(code, tmp_path)
    assert await child.close(term_s=1.0, finish_s=20.0) == 0


async def test_one_that_ignores_sigterm_is_killed_in_time(tmp_path: Path) -> None:
    code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + READY + "time.sleep(99)"
    child = await start(code, tmp_path)
    began = time.monotonic()
    assert await child.close(term_s=0.2) == -signal.SIGKILL
    assert time.monotonic() - began < 2


async def test_a_process_has_one_thread_of_each_library_and_its_secrets_from_the_environment(
    tmp_path: Path,
) -> None:
    code = (
        READY.replace("import time", "import os, time")
        + "print(os.environ['OMP_NUM_THREADS'], os.environ['KEY'])"
    )
    child = await start(code, tmp_path, env={"KEY": "s3cret"}, may_finish=True)
    await child.wait_dead()
    assert child.log_path.read_text().splitlines()[-1] == "1 s3cret"


async def test_much_output_and_long_lines_do_not_block_the_process(tmp_path: Path) -> None:
    code = "print('x' * 3_000_000); print('y\\n' * 100_000); " + READY
    child = await start(code, tmp_path, may_finish=True)
    await child.wait_dead()
    assert child.log_path.read_text().count("y\n") == 100_000


async def test_s79_what_a_process_started_ends_with_it_when_it_dies(tmp_path: Path) -> None:
    marker = f"grandchild-{os.getpid()}-{time.monotonic_ns()}"
    child = await start(_with_grandchild(marker), tmp_path)
    assert len(alive(marker)) >= 2
    os.kill(child.pid, signal.SIGKILL)
    # Its child holds its output open: that must not hide its death.
    async with asyncio.timeout(5):
        with pytest.raises(EngineError):
            await child.wait_dead()
    assert gone_within(5, marker)


def _with_grandchild(marker: str) -> str:
    """A program that starts another, which does not react to SIGTERM, says that it is ready, and goes on."""
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(99)"
    return (
        f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {stubborn!r}, 'sleeps {marker}']); "
        + READY
        + "time.sleep(99)"
    )


RUN = """
import asyncio, contextlib, signal, sys, time
from pathlib import Path
from paceline.runtime.processes import ChildProcess

mode, marker, logs, code, stuck = sys.argv[1:]

async def main():
    async with contextlib.AsyncExitStack() as stack:
        for i in range(2):
            program = stuck if mode == "while starting" and i == 1 else code
            if mode == "while starting" and i == 1:
                print("begun", flush=True)
            child = await ChildProcess.start(
                [sys.executable, "-c", program, marker], name=f"w{i}", log_path=Path(logs) / f"w{i}", start_s=1.0
            )
            await stack.enter_async_context(child)
        print("begun", flush=True)
        if mode == "exception":
            raise RuntimeError("injected")
        if mode == "clean stop":
            stop = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
            print("handles", flush=True)
            await stop.wait()
        else:
            try:
                await asyncio.sleep(99)
            except asyncio.CancelledError:
                # The second SIGINT raises KeyboardInterrupt wherever the main thread is, and that has to be here: between
                # asyncio's taking a task's wake-up from its list and running it, the wake-up would be lost, and
                # `asyncio.run` waits for the task for ever.
                print("cancelled", flush=True)
                time.sleep(99)

asyncio.run(main())
"""


def _interrupt_twice(run: subprocess.Popen[str]) -> None:
    assert run.stdout is not None
    run.send_signal(signal.SIGINT)
    assert run.stdout.readline() == "cancelled\n"
    run.send_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("mode", "end", "clean"),
    [
        ("exception", lambda _run: None, False),
        ("while starting", lambda _run: None, False),
        ("SIGTERM", lambda run: run.terminate(), False),
        ("clean stop", lambda run: (run.stdout.readline(), run.terminate()), True),
        ("SIGINT twice", _interrupt_twice, False),
        ("SIGKILL", lambda run: run.kill(), False),
    ],
)
def test_s79_however_a_run_ends_no_descendant_is_left(
    mode: str, end: Callable[[Any], Any], clean: bool, tmp_path: Path
) -> None:
    marker = f"orphan-{os.getpid()}-{time.monotonic_ns()}"
    run = subprocess.Popen(
        [
            sys.executable,
            "-c",
            RUN,
            mode,
            marker,
            str(tmp_path),
            _with_grandchild(marker),
            "import time; time.sleep(99)",
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert run.stdout is not None
        assert run.stdout.readline() == "begun\n"
        end(run)
        code = run.wait(20)
        assert (code == 0) is clean
        assert gone_within(5, marker), alive(marker)
    finally:
        run.kill()
        run.wait()
        run.stdout.close()
