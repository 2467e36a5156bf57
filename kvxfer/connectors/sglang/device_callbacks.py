"""Callbacks that wait for a device, on a thread of their own: SGLang's scheduler does not wait. Decides their order,
which is that of the calls; must never know what a callback does.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

log = logging.getLogger("kvxfer.sglang")

Fence: TypeAlias = Callable[[], object]
"""Blocks until what was asked of the device before is done, such as ``torch.cuda.Event.synchronize``. Raises what the
device failed with."""
Callback: TypeAlias = Callable[[Exception | None], None]
"""Called with what the fence raised, or ``None``."""


class DeviceCallbacks:
    """Its thread begins with the first fence, and never keeps the process from ending."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Fence, Callback] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def after(self, fence: Fence, callback: Callback) -> None:
        """Call ``callback`` once the fence is passed, and those before it. From any thread."""
        with self._lock:
            if self._is_closed:
                return
            self._waiting.put((fence, callback))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvxfer-device", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """No further callback is called; one that runs goes on. Does not wait."""
        with self._lock:
            self._is_closed = True
            self._waiting.put(None)

    def _run(self) -> None:
        while (waiting := self._waiting.get()) is not None:
            fence, callback = waiting
            failure: Exception | None = None
            try:
                fence()
            except Exception as error:
                log.exception("the device failed")
                failure = error
            if self._is_closed:
                return
            callback(failure)
