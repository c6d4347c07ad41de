"""Every error Paceline raises on purpose, split by who must act.

A message names the thing, gives the two facts that disagree, and says what to do.
"""

from __future__ import annotations

import errno
import os
import re
import sysconfig
from pathlib import Path
from types import FrameType

_OURS = str(Path(__file__).parent)
_CREDENTIALS = re.compile(r"""//[^\s"']*@|\b[^\s"'/:=]+:(?!//)[^\s"']*@""")
"""`//user:password@`, `//token@`, and `user:password@` where the scheme was forgotten: to the last `@`, since a password
may hold one, or a slash."""
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


class PacelineError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(PacelineError):
    """The configuration cannot work. Raised before any engine is contacted; the user acts."""


class EngineError(PacelineError):
    """An engine call failed or answered nonsense. Recorded on its rollout; the siblings go on."""


class ImpossibleLogprobs(EngineError):
    """A reply has logprobs that sampled tokens cannot have: not finite, or above zero. Nothing of it trains."""

    def __init__(self, text: str, *, bad: int, tokens: int) -> None:
        super().__init__(text)
        self.bad, self.tokens = bad, tokens
        """How many of how many."""


class EngineUnavailable(EngineError):
    """The engine does not answer, or cannot take the call now: another one may, or the same one later."""


class EngineBusy(EngineUnavailable):
    """The engine answers, and says that it has too much to do (429): a reason to ask later, not to give it up."""


class ModelCallFailed(EngineError):
    """A rollout's model call has failed for good: what an environment sees of it. Whatever rollouts it ends (members of a group
    that runs in one call end together), the engine is the cause."""


class EnvError(PacelineError):
    """An environment broke its contract. Recorded on its rollout; the siblings go on."""


class TrainerError(PacelineError):
    """The trainer died, or published something that cannot be used. Ends the run."""


class WireError(PacelineError):
    """A batch, weight directory or journal on disk is not what it claims to be."""


class CannotFold(PacelineError):
    """The journal does not say enough to go on from it; a checkpoint alone may do."""


class NoProgressError(PacelineError):
    """Nothing can train any more: too many groups in a row died. Ends the run with the counts."""


class InvariantError(PacelineError):
    """Our own bookkeeping is wrong. Nobody catches it: the run stops, the journal stays."""


def printable(text: str) -> str:
    """`text` as a terminal may be given it: models, environments and servers are quoted in errors, and a control
    character of theirs would move the cursor, recolour the screen or hide what stands before it. Those are shown as
    escapes; line ends and tabs stay."""
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def without_password(text: str) -> str:
    """`text` with the user and password of every address in it left out: refusals end up in logs."""
    return _CREDENTIALS.sub(lambda found: "//…@" if found[0].startswith("//") else "…@", text)


def said_by(error: BaseException) -> str:
    """Type, text and place of an error that anybody's code raised: asking it for its text may raise, too."""
    try:
        return f"{type(error).__name__}: {error}{_place(error)}"
    except Exception as broken:
        return f"{type(error).__name__} (its text raises {type(broken).__name__})"


def _place(error: BaseException) -> str:
    """` (file:line)` of the user's code that raised `error`, perhaps by way of a library; empty if it was ours."""
    place = ""
    step = error.__traceback__
    while step is not None:
        path = step.tb_frame.f_code.co_filename
        if path.startswith(_OURS):
            place = ""
        elif not path.startswith((*_LIBRARIES, "<")):
            place = f" ({Path(path).name}:{step.tb_lineno})"
        step = step.tb_next
    return place


def place_of(frame: FrameType | None) -> str:
    """`file:line` of the innermost code of the user's on the stack of `frame`; empty if there is none."""
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((_OURS, *_LIBRARIES, "<")):
            return f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def is_full(error: BaseException) -> bool:
    """Whether it says that a disk is full, or a quota used up: no mistake of the program's, and over when there is room."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # safetensors writes for itself, and says it in words; torch says that a position is wrong, because of it.
    return os.strerror(errno.ENOSPC) in str(error) or (
        error.__context__ is not None and is_full(error.__context__)
    )


def full_in_words(error: BaseException) -> str:
    """What an error that `is_full` says, with the system's words for it in front where it has others."""
    words = os.strerror(errno.ENOSPC)
    if isinstance(error, OSError) or words in str(error):
        return str(error)
    return f"{words} ({error})"
