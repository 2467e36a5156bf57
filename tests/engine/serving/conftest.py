"""Lets these tests import the helper modules beside them (``fake_agent``, ``engine_harness``)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
