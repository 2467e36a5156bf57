"""Makes the modules beside this one importable; workers end with the test that started them."""

from __future__ import annotations

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))
