"""Which transfers carry CRC-32Cs, by ChecksumMode. Decides that alone; must never know a lane."""

from __future__ import annotations

import zlib
from typing import Final

from kvxfer.types import ChecksumMode

SAMPLE: Final = 16
"""One transfer of so many is checked in mode SAMPLED."""


def carries_checksums(mode: ChecksumMode, identity: bytes, *, is_same_host: bool) -> bool:
    """Whether the transfer of that id asks for checksums. Of sampled transfers one in SAMPLE does, and it is the same
    one for every agent that asks."""
    is_sampled = mode == ChecksumMode.SAMPLED and zlib.crc32(identity) % SAMPLE == 0
    return mode == ChecksumMode.ON or is_sampled or (mode == ChecksumMode.AUTO and not is_same_host)
