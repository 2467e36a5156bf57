"""Which transfers carry CRC-32Cs, by a policy of ``config.CHECKS``. Decides that alone; must never know a lane."""

from __future__ import annotations

import zlib
from typing import Final

SAMPLE: Final = 16
"""One transfer of so many is checked where checksums are sampled."""


def carries_checksums(policy: str, identity: bytes, *, is_same_host: bool) -> bool:
    """Whether the transfer of that id asks for checksums. Of sampled transfers one in SAMPLE does, and it is the same
    one for every agent that asks."""
    is_sampled = policy == "sampled" and zlib.crc32(identity) % SAMPLE == 0
    return policy == "on" or is_sampled or (policy == "auto" and not is_same_host)
