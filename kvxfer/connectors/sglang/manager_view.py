"""What senders, receivers, hooks and the list of prefill engines use of a rank's manager, which makes all of them.
Decides nothing.
"""

from __future__ import annotations

import contextlib
from typing import Any, Protocol

from kvxfer.connectors.sglang.core import TransportCore
from kvxfer.connectors.sglang.decode_side import DecodeSide
from kvxfer.connectors.sglang.greetings import Greeting
from kvxfer.connectors.sglang.prefill_side import PrefillSide
from kvxfer.connectors.sglang.shape import KvShape


class EnginesView(Protocol):
    """The prefill engines that this rank knows."""

    def has_answered(self, address: str) -> bool: ...
    def give_up(self, bootstrap_addr: str, room: int, text: str) -> None: ...


class ManagerView(Protocol):
    """One rank's manager. ``request_status`` and what follows it are SGLang's own."""

    lock: contextlib.AbstractContextManager[Any]
    core: TransportCore
    shape: KvShape | None
    prefill_side: PrefillSide | None
    decode_side: DecodeSide | None
    timeout_s: float | None
    traceparent: str | None
    request_status: dict[int, Any]
    prefill_info_table: dict[str, Any]
    is_mla_backend: Any
    attn_tp_size: int
    pp_size: int

    @property
    def engines(self) -> EnginesView: ...
    def leave(self) -> None: ...
    def why_unknown(self) -> str | None: ...
    def why_failed(self, room: int) -> str: ...
    def forget_reason(self, room: int) -> None: ...
    def take_traceparent(self) -> str | None: ...
    def signed(self, address: tuple[str, int], greeting: Greeting) -> list[bytes]: ...
    def tell(self, address: tuple[str, int], greeting: Greeting) -> None: ...
    def introduce(self, address: tuple[str, int]) -> None: ...
    def fail(self, room: int, text: str) -> None: ...
    def fail_rooms_of(self, bootstrap_addr: str, text: str) -> None: ...
    def forget(self, bootstrap_addr: str) -> None: ...
