"""Makes the modules beside this one importable; workers end with the test that started them."""

from __future__ import annotations

import pathlib
import resource
import sys

HERE = pathlib.Path(__file__).parent
sys.path.append(str(HERE))

FILES = 4096
"""Many agents and gates at once are more than a login shell's usual 1,024 descriptors."""
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if 0 <= _soft < FILES:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES if _hard < 0 else min(FILES, _hard), _hard))
