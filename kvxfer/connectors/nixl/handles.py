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


class nixl_prepped_dlist_handle:
    """A prepared list; made by :meth:`nixl_agent.prep_xfer_dlist`."""

    __slots__ = ("_agent", "_handle", "_released")

    def __init__(self, agent: nixlAgent, value: int) -> None:
        self._agent = agent
        self._handle = int(value)
        self._released = False

    def __repr__(self) -> str:
        return f"nixl_prepped_dlist_handle(0x{self._handle:x}, released={self._released})"

    def release(self) -> None:
        """Callable twice. Transfers that were made from the list stay good."""
        if not self._released:
            self._agent.releasedDlistH(self._handle)
            self._released = True

    def __del__(self) -> None:
        if not getattr(self, "_released", True):
            with contextlib.suppress(Exception):
                self._agent.releasedDlistH(self._handle)


class nixl_xfer_handle:
    """A transfer; made by :meth:`nixl_agent.make_prepped_xfer` and :meth:`nixl_agent.initialize_xfer`."""

    __slots__ = ("_agent", "_handle", "_released")

    def __init__(self, agent: nixlAgent, value: int) -> None:
        self._agent = agent
        self._handle = int(value)
        self._released = False

    def __repr__(self) -> str:
        return f"nixl_xfer_handle(0x{self._handle:x}, released={self._released})"

    def release(self) -> None:
        """Give the transfer up, where it is under way, and wait until its memory is free. Callable twice.

        Raises nixlRepostActiveError where that takes too long; the handle stays good then.
        """
        if not self._released:
            self._agent.releaseXferReq(self._handle)
            self._released = True

    def __del__(self) -> None:
        if getattr(self, "_released", True):
            return
        try:
            self._agent.releaseXferReq(self._handle)
        except Exception as error:
            with contextlib.suppress(Exception):
                get_logger(__name__).error("%r could not be released: %s", self, error)
                self._agent._leaked_xfer_handles.append(self._handle)
