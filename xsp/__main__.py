"""Entry point of `python -m xsp`, which runs the command `xsp`."""

from __future__ import annotations

import sys

from xsp.cli import main

if __name__ == "__main__":
    sys.exit(main())
