"""What holds for all tests."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A busy machine is slow, not wrong: no property is about how long one example takes.
settings.register_profile("paceline", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("paceline")

# A shell has what it puts into the background ignore Ctrl-C, and all that is started from there with it: what is said here
# of Ctrl-C could not be tried.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def small_file_system(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes a file system of its own, of a size such as "3m": to be filled."""
    with ExitStack() as stack:

        def made(size: str) -> Path:
            place = tmp_path / "disk"
            place.mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
            if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
                pytest.skip(
                    "NOT TRIED: a real full disk, because this user may not mount a small file system"
                )
            stack.callback(subprocess.run, ["umount", "-l", str(place)], check=True)
            return place

        yield made
