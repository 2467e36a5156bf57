"""SGLang 0.5.23's receiver: one request at decode. Decides when a failed room is reported: once its pages may be
reused.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVReceiver, KVTransferError

from kvxfer.connectors.sglang import greetings
from kvxfer.connectors.sglang.decode_side import ANSWER_S, place_of
from kvxfer.connectors.sglang.manager_view import ManagerView
from kvxfer.errors import ConfigError, KvxferError


class KvxferReceiver(CommonKVReceiver):  # type: ignore[misc]
    """Of one request, at decode. One for a room that another request has is born Failed, and touches nothing."""

    kv_mgr: ManagerView

    def __init__(self, mgr: ManagerView, bootstrap_addr: str, bootstrap_room: int) -> None:
        side = mgr.decode_side
        assert side is not None
        self._side = side
        self._refusal = f"refused: room {bootstrap_room} is in use: another request has it"
        self._is_refused = bootstrap_room in mgr.request_status or not mgr.core.destinations.is_drained(bootstrap_room)
        self._has_begun = False
        self._transfer_id = ""
        self._traceparent = mgr.take_traceparent()
        self._shown = KVPoll.Bootstrapping
        self._registered_s = 0.0
        self.bootstrap_infos: Any = None
        if self._is_refused:
            self.kv_mgr, self.bootstrap_room, self.bootstrap_addr = mgr, bootstrap_room, bootstrap_addr
            self.conclude_state = KVPoll.Failed
            self._owns_bootstrap_room = False
            self.abort_notified, self.require_staging, self.init_time = False, False, None
            return
        mgr.forget_reason(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room)

    def init(self, prefill_dp_rank: int) -> None:
        """Register this rank at the prefill ranks that do not know it."""
        if self._is_refused:
            return
        self._registered_s = time.monotonic()
        super().init(prefill_dp_rank)
        why = self.kv_mgr.why_unknown()
        if why is not None:
            self.kv_mgr.fail(self.bootstrap_room, f"weights_unknown: {why}")
            self.ensure_abort_notified()  # prefill waits for this rank by now

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        *arguments: Any,
        **more: Any,
    ) -> None:
        """From now on the pages are filled, and belong to the core until the room is over and drained."""
        room, mgr = self.bootstrap_room, self.kv_mgr
        if self._is_refused or self.conclude_state == KVPoll.Failed:
            return
        try:
            if more.pop("device_kv_indices", None) is not None:
                raise ConfigError("the transfer backend kvxfer does not receive into HiSparse pools yet")
            if self.bootstrap_infos is None or self._side.waits_for(self.bootstrap_infos) is not None:
                raise ConfigError("pages are given to a room before its prefill engine answered")
            transfer_id = self._side.begin(room, self.bootstrap_addr)
            self._transfer_id = str(transfer_id)
            self._has_begun = True
            mgr.core.destinations.begin(
                room,
                transfer_id,
                self._side.sources(self.bootstrap_infos),
                np.asarray(kv_indices),
                0 if aux_index is None else int(aux_index),
                rows_of(state_indices),
                mgr.timeout_s,
                self._traceparent,
            )
        except KvxferError as error:
            self._has_begun, self._transfer_id = False, ""
            mgr.fail(room, f"{error.code}: {error}")
            self.ensure_abort_notified()  # prefill waits for this rank by now
            return
        super().send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len, *arguments, **more)

    def poll(self) -> Any:
        """Failed is told once the room's pages may be used anew."""
        if self._is_refused:
            return KVPoll.Failed
        status = super().poll()
        if status == KVPoll.WaitingForInput and not self._has_begun:
            status = self._registration()
        if status == KVPoll.Failed and self._has_begun:
            self.kv_mgr.core.destinations.abort(self.bootstrap_room, self.kv_mgr.why_failed(self.bootstrap_room))
            if not self.kv_mgr.core.destinations.is_drained(self.bootstrap_room):
                return self._shown
        self._shown = status
        return status

    def clear(self) -> None:
        """Reads that are under way end all the same; until then the room is in use."""
        if self._is_refused:
            return
        if self._has_begun:
            self.kv_mgr.core.destinations.clear(self.bootstrap_room)
        self._side.end(self.bootstrap_room)
        with self.kv_mgr.lock:
            super().clear()

    def abort(self) -> None:
        if self._is_refused:
            return
        super().abort()
        if self._has_begun:
            self.kv_mgr.core.destinations.abort(self.bootstrap_room, self.kv_mgr.why_failed(self.bootstrap_room))

    def failure_exception(self) -> None:
        if self._is_refused:
            raise KVTransferError(self.bootstrap_room, self._refusal)
        super().failure_exception()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        if self._is_refused or self.abort_notified:
            return
        if self.bootstrap_infos is not None:
            super().ensure_abort_notified(force_arm=force_arm)
        else:  # prefill may have a sender for it, and would wait until SGLang's own timeout
            self.abort_notified = True
            self.kv_mgr.engines.give_up(
                self.bootstrap_addr, self.bootstrap_room, self.kv_mgr.why_failed(self.bootstrap_room)
            )

    def _send_abort_notification(self, *, force_arm: bool = False) -> None:
        abort = greetings.Abort(self.bootstrap_room, self._transfer_id, self.kv_mgr.why_failed(self.bootstrap_room))
        for info in self.bootstrap_infos:
            self.kv_mgr.tell(place_of(info), abort)

    def _send_bootstrap_message(self, *, bootstrap_info: dict[str, Any], message: Any, operation: Any) -> Any:
        """SGLang's, of a message that is for that rank alone."""
        frames = self.kv_mgr.signed(place_of(bootstrap_info), message)
        return super()._send_bootstrap_message(bootstrap_info=bootstrap_info, message=frames, operation=operation)

    def _registration(self) -> Any:
        refused, place = self._side.refusal(self.bootstrap_infos), self._side.waits_for(self.bootstrap_infos)
        if refused is None and place is None:
            return KVPoll.WaitingForInput
        if refused is not None:
            text = f"{refused.code}: the prefill engine at {self.bootstrap_addr} refused: {refused.text}"
        elif place is not None and time.monotonic() - self._registered_s < ANSWER_S:
            return KVPoll.Bootstrapping
        else:
            text = (
                f"peer_gone: the prefill rank at {place} did not answer within {ANSWER_S:g} s; one with another "
                "cluster token does not answer, and says so in its log"
            )
        self.kv_mgr.fail(self.bootstrap_room, text)
        self.ensure_abort_notified()  # prefill, which may have a sender for it, waits for this rank
        self.kv_mgr.forget(self.bootstrap_addr)  # so that the next room asks anew
        self.conclude_state = KVPoll.Failed
        return KVPoll.Failed


def rows_of(state_indices: list[Any] | None) -> tuple[Any, ...]:
    """Of each state component its rows; some of SGLang's are lists of arrays."""
    return tuple(None if rows is None else np.asarray(rows).ravel() for rows in state_indices or ())
