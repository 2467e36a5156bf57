"""torch, when it is imported, wants a directory for code that it compiles: here it gets one where there is none.

Decides only which; the built-in engine compiles nothing, so nothing is ever written there.
"""

from __future__ import annotations

import os
import tempfile

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
SOME_DIRECTORY = "/"
"""It is there and need not be writable."""


def do_without_directory() -> None:
    """Before torch is imported: name a directory to it where no temporary one can be made, which ends its import."""
    if VARIABLE in os.environ:
        return
    try:
        tempfile.gettempdir()
    except OSError:
        os.environ[VARIABLE] = SOME_DIRECTORY
