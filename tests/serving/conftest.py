"""Makes `serving_support` importable, wherever the tests are run from."""

from __future__ import annotations

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parent))
