"""Which prefill engines exist, and what SGLang 0.5.23 knows of each. Decides when one counts as gone or does not fit;
then the rooms that wait for it fail. The scheduler's thread waits for none of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from typing import Any

import requests
from sglang.srt.disaggregation.common.conn import CommonKVManager

from kvxfer.connectors.sglang.decode_side import place_of
from kvxfer.connectors.sglang.greetings import Abort
from kvxfer.connectors.sglang.inquiries import Inquiries
from kvxfer.connectors.sglang.limits import check_sizes
from kvxfer.connectors.sglang.manager_view import ManagerView
from kvxfer.errors import KvxferError

log = logging.getLogger("kvxfer.sglang")

GONE_S = 1.7
"""A prefill engine whose bootstrap server does not answer for so long is given up; SGLang asks once a second."""
ROW_S = 5.0
"""Failed asks are of one row if they are no further apart."""
PROBE_S = 1.8
"""Longer, so that a host that says nothing needs to be asked once; a packet that was lost is sent again after 1 s."""
FAREWELLS_MAX = 16
"""How many engines are told at once of rooms that were given up early."""
NOT_READY = object()
"""A prefill engine some of whose ranks are not there yet."""


@dataclasses.dataclass(frozen=True)
class Missed:
    """No engine that was asked then answered."""

    asked_s: float


class _Scratch:
    """The manager, but what SGLang finds out of a prefill engine stays here."""

    def __init__(self, manager: ManagerView) -> None:
        self.prefill_info_table: dict[str, Any] = {}
        self._manager = manager

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)


class PrefillEngines:
    """On the scheduler's thread, which never waits here; :meth:`give_up` from any thread."""

    def __init__(self, manager: ManagerView) -> None:
        self._manager = manager
        self._inquiries: Inquiries[Any] = Inquiries(self._inquire)
        self._missed: dict[str, tuple[float, float]] = {}
        """When the first and the last failed ask in a row were."""
        self._lock = threading.Lock()
        self._given_up: dict[str, list[Abort]] = {}
        """By engine, rooms that it has to be told of."""

    def ensure(self, bootstrap_addr: str) -> bool:
        """Whether SGLang's manager knows now what that engine is. One that is gone, or that does not fit, fails the
        rooms that wait for it."""
        answer = self._inquiries.take(bootstrap_addr)
        if answer is None:
            return False
        if isinstance(answer, Missed):
            self._miss(bootstrap_addr, answer.asked_s)
            return False
        self._missed.pop(bootstrap_addr, None)
        if isinstance(answer, str):
            self._manager.fail_rooms_of(bootstrap_addr, answer)
        elif answer is not NOT_READY:
            self._manager.prefill_info_table[bootstrap_addr] = answer
            return True
        return False

    def has_answered(self, bootstrap_addr: str) -> bool:
        """Whether :meth:`ensure` would learn something of it now."""
        answer = self._inquiries.look(bootstrap_addr)
        return answer is not None and answer is not NOT_READY and not isinstance(answer, Missed)

    def give_up(self, bootstrap_addr: str, room: int, text: str) -> None:
        """That room ends here before its prefill ranks were asked for. They hear it from another thread, which finds
        them. Nothing happens if there is no engine that fits."""
        with self._lock:
            if bootstrap_addr not in self._given_up and len(self._given_up) >= FAREWELLS_MAX:
                log.warning("room %d was given up, and the engine at %s is not told", room, bootstrap_addr)
                return
            waiting = self._given_up.setdefault(bootstrap_addr, [])
            waiting.append(Abort(room, "", text))
            if len(waiting) == 1:
                threading.Thread(
                    target=self._tell_given_up, args=(bootstrap_addr,), name="kvxfer farewell", daemon=True
                ).start()

    def _tell_given_up(self, bootstrap_addr: str) -> None:
        """On another thread."""
        ranks: list[dict[str, Any]] = []
        try:
            ranks = self._ranks_of(bootstrap_addr)
        except Exception as error:  # what answers there may be anything
            log.warning("the prefill ranks at %s could not be found: %s", bootstrap_addr, error)
        with self._lock:
            aborts = self._given_up.pop(bootstrap_addr)
        side = self._manager.decode_side
        for rank in ranks:
            if side is not None and side.waits_for([rank]) is not None:
                self._manager.introduce(place_of(rank))
            for abort in aborts:
                self._manager.tell(place_of(rank), abort)

    def _ranks_of(self, bootstrap_addr: str) -> list[dict[str, Any]]:
        """Those that rooms of this rank are asked of, of each data parallel rank. Raises what `requests` does."""
        info = self._manager.prefill_info_table.get(bootstrap_addr) or self._inquire(bootstrap_addr)
        if info is NOT_READY or isinstance(info, (Missed, str)):
            return []
        groups = (range(info.dp_size), info.target_cp_ranks, info.target_tp_ranks, info.target_pp_ranks)
        names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
        return [
            requests.get(
                f"http://{bootstrap_addr}/route", params=dict(zip(names, rank, strict=True)), timeout=PROBE_S
            ).json()
            for rank in itertools.product(*groups)
        ]

    def _miss(self, bootstrap_addr: str, asked_s: float) -> None:
        now_s = time.monotonic()
        self._missed = {at: row for at, row in self._missed.items() if now_s - row[1] < ROW_S}
        first_s, _ = self._missed.get(bootstrap_addr, (asked_s, asked_s))
        self._missed[bootstrap_addr] = first_s, asked_s
        if now_s - first_s >= GONE_S:
            del self._missed[bootstrap_addr]
            self._manager.fail_rooms_of(bootstrap_addr, f"peer_gone: no prefill engine answers at {bootstrap_addr}")
        else:
            self._inquiries.take(bootstrap_addr)  # asked anew by now, so that the next look finds an answer

    def _inquire(self, bootstrap_addr: str) -> Any:
        """On another thread. SGLang's PrefillServerInfo; Missed; NOT_READY; or why the engine there does not fit."""
        asked_s, manager = time.monotonic(), self._manager
        try:
            requests.get(f"http://{bootstrap_addr}/health", timeout=PROBE_S)
        except requests.RequestException:
            return Missed(asked_s)
        scratch = _Scratch(manager)
        try:
            if not CommonKVManager.try_ensure_parallel_info(scratch, bootstrap_addr):
                return NOT_READY
            info = scratch.prefill_info_table[bootstrap_addr]
            check_sizes(
                is_cut=manager.shape is not None,
                has_all_heads=bool(manager.is_mla_backend),
                prefill=info,
                decode_tp_size=manager.attn_tp_size,
                decode_pp_size=manager.pp_size,
            )
        except (RuntimeError, AssertionError, TypeError, KvxferError) as error:  # SGLang's own would be caught nowhere
            return f"incompatible: {error}"
        return info
