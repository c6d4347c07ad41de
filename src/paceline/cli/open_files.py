"""How many files, pipes and connections this process may have open."""

from __future__ import annotations

import contextlib
import resource

MOST = 65_536
"""More is of no use to a run, and where everything is allowed it may be a thousand million."""


def allow_open_files() -> int:
    """Raise the limit as far as the system lets us, and return it. A call in flight is a connection, and many systems begin with a
    limit of 1,024, or 256, so that old programs that use `select` are not surprised."""
    allowed, at_most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if at_most == resource.RLIM_INFINITY else min(at_most, MOST)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        with contextlib.suppress(
            ValueError, OSError
        ):  # a system may have a lower limit that it does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, at_most))
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if allowed == resource.RLIM_INFINITY else allowed
