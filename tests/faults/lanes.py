"""The lanes that can be tried here."""

from __future__ import annotations

from kvxfer.transport import ucx

ONE_SIDED = ["mapped", "cma"]
STREAMS = ["unix", "stream"]
HAS_UCX = bool(ucx.find_library().path)
LANES = [*ONE_SIDED, *STREAMS, *(["ucx"] if HAS_UCX else [])]
