"""`python -m paceline.trainer --run DIR --model DIR`."""

from __future__ import annotations

import sys

from paceline.trainer.loop import main

if __name__ == "__main__":
    sys.exit(main())
