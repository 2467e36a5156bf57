"""Runs :func:`kvxfer.testing.sim.command.main`."""

from __future__ import annotations

import sys

from kvxfer.testing.sim.command import main

if __name__ == "__main__":
    sys.exit(main())
