"""SGLang 0.5.23's sender: one request at prefill. Decides which of its calls ends a room at the source."""

from __future__ import annotations

from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll, KVTransferMetric
from sglang.srt.disaggregation.common.conn import CommonKVSender, KVTransferError
from sglang.srt.observability.trace import TraceNullContext

from kvxfer.connectors.sglang.manager_view import ManagerView
from kvxfer.connectors.sglang.source_room import Moved
from kvxfer.errors import KvxferError


class KvxferSender(CommonKVSender):  # type: ignore[misc]
    """The sender of one request, at prefill. If another request has the room, the sender begins in state Failed, and no
    call of it has an effect on that room."""

    kv_mgr: ManagerView

    def __init__(
        self,
        mgr: ManagerView,
        bootstrap_addr: str,
        bootstrap_room: int,
        req_has_disagg_prefill_dp_rank: bool = False,
    ) -> None:
        side = mgr.prefill_side
        assert side is not None
        self._side = side
        self._refusal = f"refused: room {bootstrap_room} is in use: another request has it"
        self._is_refused = bootstrap_room in mgr.request_status or side.has(bootstrap_room)
        self._is_over = self._is_cleared = self._is_refused
        self._moved: Moved | None = None
        traceparent = mgr.take_traceparent()
        if self._is_refused:
            self.kv_mgr, self.bootstrap_room, self.aux_index = mgr, bootstrap_room, None
            self.conclude_state = KVPoll.Failed
            self._early_send_wait_event = None
            self.trace_ctx = TraceNullContext()
            return
        mgr.forget_reason(bootstrap_room)
        super().__init__(mgr, bootstrap_addr, bootstrap_room, req_has_disagg_prefill_dp_rank)
        why = mgr.why_unknown()
        try:
            if why is not None:
                mgr.fail(bootstrap_room, f"weights_unknown: {why}")
            if mgr.request_status.get(bootstrap_room) != KVPoll.Failed:
                side.open(bootstrap_room, traceparent)
        except KvxferError as error:
            mgr.fail(bootstrap_room, f"{error.code}: {error}")

    def poll(self) -> Any:
        """The state of the room. A call also counts as a heartbeat of the engine."""
        self.kv_mgr.core.pulses.step(True)
        status = super().poll()
        if status == KVPoll.Failed:
            self._give_up()
        elif status == KVPoll.Success and self._moved is None:  # get_transfer_metric comes after clear
            self._moved = self.kv_mgr.core.sources.moved(self.bootstrap_room)
        return status

    def poll_pp_consensus(self) -> Any:
        return self.poll()

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        if not self._is_refused:
            super().init(num_kv_indices, aux_index)

    def pop_decode_prefix_len(self) -> int:
        return 0 if self._is_refused else int(super().pop_decode_prefix_len())

    def get_transfer_metric(self) -> Any:
        """Bytes and seconds, from the first grant to the last commit. The waits for the device and for the reader
        count."""
        if self._moved is None or not self._moved.bytes:
            return KVTransferMetric()
        return KVTransferMetric(transfer_latency_s=self._moved.seconds, transfer_total_bytes=self._moved.bytes)

    def abort(self) -> None:
        """When this returns, the request's pages may be used anew. SGLang does not always clear a sender after it."""
        if not self._is_cleared:
            super().abort()
            self.clear()

    def clear(self) -> None:
        """Forget the room. A room that did not succeed ends as by :meth:`abort`."""
        if self._is_cleared:
            return
        self._is_cleared = True
        if self.kv_mgr.request_status.get(self.bootstrap_room) == KVPoll.Success:
            self._is_over = True
            self._side.close(self.bootstrap_room, None)
        else:
            self._give_up()
        with self.kv_mgr.lock:
            super().clear()

    def failure_exception(self) -> None:
        if self._is_refused:
            raise KVTransferError(self.bootstrap_room, self._refusal)
        super().failure_exception()

    def _give_up(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._side.close(self.bootstrap_room, self.kv_mgr.why_failed(self.bootstrap_room))
