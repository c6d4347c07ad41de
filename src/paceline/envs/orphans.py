"""Programs of environments end with the process that started them, however that ends.

    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **marked()}, start_new_session=True)

A watcher, one for all programs of a process, reads a pipe whose other end this process alone holds. The pipe's end
means that the process is gone, by SIGKILL too: the watcher then looks for programs that carry the process's mark in
their environment, and ends them and their process groups. The mark is inherited, so what a program starts is found as
well, in a session of its own too, and no number of a process that has ended is mistaken for another's.

(`runtime/parent.py` keeps one watcher a child, in the child's group. For programs, of which there is one a rollout, that
would double the cost of a start, and leave a zombie each where nothing reaps, as in a container without an init.)

Needs /proc: on systems other than Linux programs end in every other way, but not when the process is killed. Run by its
path, this file is the watcher, and imports nothing but the standard library.
"""

import functools
import os
import signal
import sys
import time

MARK = "PACELINE_STARTED_BY"
"""The variable of a program's environment that names the process that started it."""

GRACE_S = 2.0
"""Between asking programs to end and making them."""

_AGAIN_S = 0.2
"""Until the second look: what was about to begin at the first one has begun then."""


@functools.cache
def _mark(pid: int) -> str:
    """The mark of this process; begins the watch. Anew in a process that was forked."""
    mark = os.urandom(16).hex()
    theirs, ours = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    try:
        # Not a child of asyncio's or subprocess's: nobody waits for it, and it outlives us.
        os.posix_spawn(
            sys.executable,
            [sys.executable, "-I", "-S", os.path.abspath(__file__), mark],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs, 0),
                (os.POSIX_SPAWN_DUP2, null, 1),
                (os.POSIX_SPAWN_DUP2, null, 2),
            ],
            # From its first moment: whoever ends this process may end its group, as Ray does, while Python starts there.
            setsid=True,
        )
    except BaseException:
        os.close(ours)  # else it is held, and not inheritable, until this process ends
        raise
    finally:
        os.close(theirs)
        os.close(null)
    return mark


def marked() -> dict[str, str]:
    """What the environment of a program must hold. OSError when no process is to be had for the watch."""
    return {MARK: _mark(os.getpid())}


# ── the watcher ──


def _groups(entry: bytes) -> set[int]:
    """Process groups with a member that carries the mark; those without end, or that are somebody else's, do not."""
    found: set[int] = set()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as file:
                if entry in file.read().split(b"\0"):
                    found.add(os.getpgid(int(name)))
        except OSError:  # it has ended meanwhile, or is another user's
            continue
    return found


def _signal(groups: set[int], number: int) -> None:
    for group in groups:
        try:
            os.killpg(group, number)
        except OSError:
            continue


def main(mark: str) -> None:
    """Wait for the end of standard input, then end what carries the mark."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        pass
    entry = f"{MARK}={mark}".encode()
    _signal(_groups(entry), signal.SIGTERM)
    time.sleep(_AGAIN_S)
    left = _groups(entry)
    _signal(left, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = _groups(entry)
    _signal(left, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
