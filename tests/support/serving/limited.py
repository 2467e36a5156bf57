"""Runs kvxfer's command line under a limit of open files: ``python -m tests.support.serving.limited
SOFT HARD router --port=0 ...``."""

from __future__ import annotations

import resource
import sys

from kvxfer.cli import main

if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
    sys.exit(main(sys.argv[3:]))
