"""What the fuzzer of the Python decoders and its tests share is imported from here."""

from __future__ import annotations

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
