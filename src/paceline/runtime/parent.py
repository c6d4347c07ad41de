"""Starts a program that, with everything it starts, ends when the process that asked for it is gone.

Run as `python parent.py PROGRAM ARGUMENT...` with a pipe as standard input. It leaves a small keeper behind in
the program's process group and becomes the program. The keeper reads the pipe: its end means that the other side
was closed or is dead, however it died, and then the whole group is ended. No signal of the parent is needed,
none of the program's own code, and grandchildren are included (they share the group).

Imports nothing but the standard library: it is started by its path, without site packages.
"""

import os
import signal
import sys
import time

GRACE_S = 2.0
"""Between asking the group to end and making it."""


def _keep() -> None:
    """Wait for the end of standard input, then end the process group, this process last."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The program's output must end with the program, not with its keeper.
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    try:
        while os.read(0, 4096):
            pass
    except OSError:
        pass
    os.killpg(0, signal.SIGTERM)
    time.sleep(GRACE_S)
    os.killpg(0, signal.SIGKILL)


def main(argv: list[str]) -> None:
    """Never returns."""
    child = os.fork()
    if child == 0:
        # Once more, so that the program is not the keeper's parent: it might wait for any child.
        if os.fork() == 0:
            _keep()
        os._exit(0)
    os.waitpid(child, 0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        print(f"cannot start {argv[0]}: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


if __name__ == "__main__":
    main(sys.argv[1:])
