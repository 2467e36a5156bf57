"""``python -m kvxfer.cli``: the same command as ``kvxfer``, for children that must run this very interpreter."""

from __future__ import annotations

import sys

from kvxfer.cli import main

if __name__ == "__main__":
    sys.exit(main())
