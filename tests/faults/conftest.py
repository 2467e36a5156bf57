"""Many agents and proxies at once need many descriptors."""

from __future__ import annotations

import resource

FILES = 4096
"""More than a login shell's usual 1,024 descriptors."""
_soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
if 0 <= _soft < FILES:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES if _hard < 0 else min(FILES, _hard), _hard))
