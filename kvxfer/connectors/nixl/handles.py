"""The two handles that NIXL's Python API returns. Decides when their resources are freed: at :meth:`release`, else when
the handle is no longer referenced.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from kvxfer.connectors.nixl.logging import get_logger

if TYPE_CHECKING:
    from kvxfer.connectors.nixl.agent import nixlAgent

nixl_backend_handle = int


class _Handle:
    """What both handles share: they are released once, and :meth:`_free` is what that does."""

    __slots__ = ("_agent", "_handle", "_released")

    def __init__(self, agent: nixlAgent, value: int) -> None:
        self._agent = agent
        self._handle = int(value)
        self._released = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(0x{self._handle:x}, released={self._released})"

    def release(self) -> None:
        if not self._released:
            self._free()
            self._released = True

    def __del__(self) -> None:
        if getattr(self, "_released", True):
            return
        try:
            self._free()
        except Exception as error:
            with contextlib.suppress(Exception):
                self._leaked(error)

    def _free(self) -> None:
        raise NotImplementedError

    def _leaked(self, error: Exception) -> None:
        """It could not be freed, and is no longer referenced."""


class nixl_prepped_dlist_handle(_Handle):
    """A prepared list; made by :meth:`nixl_agent.prep_xfer_dlist`. :meth:`release` may be called twice; transfers that
    were made from the list stay good."""

    __slots__ = ()

    def _free(self) -> None:
        self._agent.releasedDlistH(self._handle)


class nixl_xfer_handle(_Handle):
    """A transfer; made by :meth:`nixl_agent.make_prepped_xfer` and :meth:`nixl_agent.initialize_xfer`.

    :meth:`release`, which may be called twice, gives the transfer up, where it is under way, and waits until its memory
    is free. It raises nixlRepostActiveError where that takes too long; the handle stays good then.
    """

    __slots__ = ()

    def _free(self) -> None:
        self._agent.releaseXferReq(self._handle)

    def _leaked(self, error: Exception) -> None:
        get_logger(__name__).error("%r could not be released: %s", self, error)
        self._agent._leaked_xfer_handles.append(self._handle)
