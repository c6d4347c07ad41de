"""`python -m paceline`, the same as `paceline`."""

from __future__ import annotations

import sys

from paceline.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
