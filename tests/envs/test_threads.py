"""Threads of environments: as many as are needed, and none that keeps a process from ending."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from paceline.envs.threads import DaemonThreads


def test_work_runs_side_by_side_up_to_the_most_and_then_in_line() -> None:
    pool = DaemonThreads(4, "t")
    lock, running, most = threading.Lock(), 0, 0

    def work(number: int) -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.02)
        with lock:
            running -= 1
        return number

    futures = [pool.submit(work, n) for n in range(40)]
    assert [future.result(10) for future in futures] == list(range(40))
    assert most == 4


def test_a_thread_that_is_free_is_used_again() -> None:
    pool = DaemonThreads(64, "t")
    seen = set()
    for _ in range(20):
        seen.add(pool.submit(threading.get_ident).result(10))
        time.sleep(0.005)
    assert len(seen) < 5


def test_what_it_raises_comes_to_who_asked_and_the_thread_goes_on() -> None:
    pool = DaemonThreads(1, "t")
    with pytest.raises(SystemExit):
        pool.submit(sys.exit, 3).result(10)
    assert pool.submit(int, "7").result(10) == 7


def test_code_that_blocks_does_not_keep_the_process() -> None:
    program = (
        "import time; from paceline.envs.threads import DaemonThreads;"
        "DaemonThreads(2, 't').submit(time.sleep, 600); time.sleep(0.1)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0
