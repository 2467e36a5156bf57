"""SGLang 0.5.23's manager of a rank's connections over the transport core, and the classes that SGLang asks for.
Decides which of SGLang's calls means what; whatever is not of this version of SGLang is beside it.

SGLang's scheduler thread makes senders and receivers and polls them; a thread of ours hears SGLang's socket; callbacks
come from the agent's thread. Statuses are SGLang's (`KVPoll`): Failed is told only once no page is touched any more.
"""

from __future__ import annotations

import dataclasses
import logging
import multiprocessing.util
import os
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import zmq
from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVBootstrapServer, CommonKVManager, CommonKVReceiver
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_parallel
from sglang.srt.utils.network import NetworkAddress

from kvxfer.connectors.common.weights import Weights
from kvxfer.connectors.sglang import greetings, hooks_0_5_23
from kvxfer.connectors.sglang.core import TransportCore, drawn_agent_id
from kvxfer.connectors.sglang.correspondence import Correspondence
from kvxfer.connectors.sglang.decode_side import DecodeSide, place_of
from kvxfer.connectors.sglang.destination import DestinationCallbacks
from kvxfer.connectors.sglang.limits import Identity, Layout, check_arguments, check_components
from kvxfer.connectors.sglang.memory import Buffers, EngineMemory
from kvxfer.connectors.sglang.metrics import LOOK_S
from kvxfer.connectors.sglang.observability_0_5_23 import export_spans, rank_metrics
from kvxfer.connectors.sglang.options import Options
from kvxfer.connectors.sglang.prefill_engines_0_5_23 import PrefillEngines
from kvxfer.connectors.sglang.prefill_side import PrefillSide, Wanted
from kvxfer.connectors.sglang.receiver_0_5_23 import KvxferReceiver, rows_of
from kvxfer.connectors.sglang.record import make_record, models_of, shape_of
from kvxfer.connectors.sglang.sender_0_5_23 import KvxferSender
from kvxfer.connectors.sglang.shape import KvShape
from kvxfer.connectors.sglang.source import SourceCallbacks
from kvxfer.connectors.sglang.updates import UPDATES
from kvxfer.errors import KvxferError, WeightsUnknownError
from kvxfer.ratelimit import RateLimitedWarning
from kvxfer.rpc import member_token
from kvxfer.types import Role

log = logging.getLogger("kvxfer.sglang")

WEIGHTS_S = 600.0
"""SGLang has no other way than a transfer: an engine starts once it is known which weights it has, or why not."""
HEAR_MS = 200
LEAVE_FIRST = 100
"""Of what multiprocessing calls at the end of a process; SGLang's own has no priority, and comes later."""
FOR_EVER_S = 86400.0
"""What SGLang waits for a transfer where its own setting does not say: the core's bounds end it before."""


class KvxferManager(CommonKVManager):  # type: ignore[misc]
    """Of one rank."""

    supports_deferred_decode_kv_release = True
    reports_transfer_latency = True

    def __init__(
        self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False
    ) -> None:
        """Raises ConfigError for what this backend does not do, WeightsUnknownError where it will never be known which
        weights these are, AuthenticationError, CoordinatorUnavailableError."""
        is_mla = bool(is_mla_backend)
        is_prefill = disaggregation_mode == DisaggregationMode.PREFILL
        options = Options.from_environment(os.environ)
        arguments = resolved(server_args)
        check_arguments(arguments)
        self.lock = threading.RLock()
        self._signer = greetings.signer_of(member_token(options.token_file))
        model = ModelConfig.from_server_args(server_args)
        parallel = get_parallel()
        tp_size = parallel.attn_tp_size
        rank = rank_of(args, tp_size)
        shape = None
        if has_plain_pages():
            is_latent = is_mla or bool(getattr(args, "is_hybrid_mla_backend", False))
            heads = int(model.get_total_num_kv_heads())
            first, total = stage_of(args, model, parallel.pp_size)
            shape = shape_of(
                args, total_heads=heads, is_latent=is_latent, tp_size=tp_size, first_layer=first, total_layers=total
            )
        self.layout, memory = registered(args, shape)
        self.shape = shape
        self.weights = Weights(models_of(arguments), loaded=UPDATES)
        if not self.weights.wait(WEIGHTS_S):
            self.weights.forget(f"its weights could not be read within {WEIGHTS_S:g} s; what was read is kept")
        why = self.weights.why
        if why is not None:
            self.weights.stop()
            raise WeightsUnknownError(
                f"{why}. An engine of SGLang whose weights are not known could serve nothing with the transfer backend "
                "kvxfer: start it again once its files are in place"
            )
        record = make_record(arguments, model, args, is_mla=is_mla, tp_size=tp_size, shape=shape)
        self.record = dataclasses.replace(record, weights_fingerprint=self.weights.fingerprint)
        role = Role.PREFILL if is_prefill else Role.DECODE
        self._metrics = rank_metrics(role)
        sent, loaded = (
            ({}, {}) if self._metrics is None else ({"on_over": self._metrics.sent}, {"on_over": self._metrics.loaded})
        )
        self.core = TransportCore(
            options,
            memory,
            self.record,
            agent_id=drawn_agent_id(options, role),
            rank=rank,
            role=role,
            source_callbacks=SourceCallbacks(self.succeed, self._source_failed, self._began, **sent),
            destination_callbacks=DestinationCallbacks(self.succeed, self._destination_failed, **loaded),
        )
        self._correspondence = Correspondence(self.core.agent_id)
        self.prefill_side = PrefillSide(self, self.core, rank) if is_prefill else None
        self.decode_side = None if is_prefill else DecodeSide(self, self.core)
        self.engines = PrefillEngines(self)
        self._stopping = threading.Event()
        self.core.start()
        self.weights.listen(self._describe)
        self._describe()
        super().__init__(args, disaggregation_mode, server_args, is_mla)
        self.enable_deferred_decode_kv_release = True
        self.timeout_s: float | None = None
        """How long a room waits for its prompt, where SGLang's own setting says so."""
        if not is_prefill:
            waiting = envs.SGLANG_DISAGGREGATION_WAITING_TIMEOUT
            self.timeout_s = float(waiting.get()) if waiting.is_set() else None
            self.waiting_timeout = self.timeout_s or FOR_EVER_S
            self._start_heartbeat_checker_thread()
        self._hearing = threading.Thread(target=self._hear, name="kvxfer greetings", daemon=True)
        self._hearing.start()
        self.traceparent: str | None = None
        """Of the request that SGLang makes a sender or receiver for now."""
        export_spans()
        hooks_0_5_23.install()
        hooks_0_5_23.MANAGERS.add(self)
        self._at_exit = multiprocessing.util.Finalize(None, self.leave, exitpriority=LEAVE_FIRST)

    def leave(self) -> None:
        """This process ends, and the peers that wait for this rank hear so at once. Waits 5 s at most. Callable
        twice."""
        if not self._stopping.is_set():
            log.info("the engine ends: %r tells its peers", self.core)
        self._stopping.set()
        self.core.stop()

    def teardown(self) -> None:
        """End this rank's agent and threads. SGLang calls it for a change of roles only, which this backend refuses."""
        self._at_exit.cancel()
        hooks_0_5_23.MANAGERS.discard(self)
        self._stopping.set()
        self._hearing.join(HEAR_MS / 1000 * 10)
        if self.decode_side is not None:
            self._heartbeat_shutdown.set()
        self.weights.stop()
        self.core.stop()
        self._zmq_ctx.destroy(linger=0)

    # --- what both sides need  ---

    @property
    def address(self) -> str:
        """Where this rank hears messages, as they carry it."""
        return str(NetworkAddress(self.local_ip, self.rank_port).to_host_port_str())

    def identity(self) -> Identity:
        """What its pages are."""
        return Identity(self.record, self.layout, self.shape)

    def why_unknown(self) -> str | None:
        """Why it is not known which weights this rank has; ``None``: it is."""
        return self.weights.why

    def signed(self, address: tuple[str, int], greeting: greetings.Greeting) -> list[bytes]:
        """A message for the process that was heard last from there, and for no other; to be sent once."""
        return greetings.encode(self._signer, self.address, greeting, self._correspondence.mark(address, greeting))

    def tell(self, address: tuple[str, int], greeting: greetings.Greeting) -> None:
        """Send it, once a process was heard from there; if none hears it, nothing happens."""
        if not self._correspondence.hold(address, greeting):
            self._send(address, greeting)

    def introduce(self, address: tuple[str, int]) -> None:
        """Register this decode rank at the prefill rank there."""
        self._send(address, self.build_receiver_registration_message())

    def _send(self, address: tuple[str, int], greeting: greetings.Greeting) -> None:
        place = NetworkAddress(*address)
        try:
            frames = self.signed(address, greeting)
            self._send_multipart_locked(place.to_tcp(), frames, is_ipv6=place.is_ipv6)
        except (zmq.ZMQError, KvxferError) as error:
            log.warning("%s could not be told: %s", place.to_host_port_str(), error)

    def update_status(self, bootstrap_room: int, status: int) -> None:
        """As SGLang does it, but a room that is cleared meanwhile stays so."""
        with self.lock:
            super().update_status(bootstrap_room, status)

    def succeed(self, room: int) -> None:
        """All of it is committed."""
        self.update_status(room, KVPoll.Success)

    def fail(self, room: int, text: str) -> None:
        """It comes to nothing; the first reason counts."""
        with self.lock:
            if room not in self.request_status:
                return
            with self.failure_lock:
                self.failure_records.setdefault(room, text)
            self.update_status(room, KVPoll.Failed)

    def why_failed(self, room: int) -> str:
        """The reason that was recorded."""
        with self.failure_lock:
            return str(self.failure_records.get(room, "another rank of this engine gave it up"))

    def forget_reason(self, room: int) -> None:
        """Of an earlier request that had the same room, and whose reason was not asked for."""
        with self.failure_lock:
            self.failure_records.pop(room, None)

    def take_traceparent(self) -> str | None:
        """Of the request whose sender or receiver this call makes; where SGLang does not trace, ``None``."""
        traceparent, self.traceparent = self.traceparent, None
        return traceparent

    # --- prefill ---

    def ready(self, room: int, wanted: list[Wanted]) -> None:
        """Every decode rank that wants this room said so."""
        with self.lock:
            if room not in self.request_status:
                return
            self.transfer_infos[room] = {each.reader.agent_id: each for each in wanted}
            self.resolve_kv_replica_factor(self.transfer_infos[room])
            self.req_to_decode_prefix_len[room] = wanted[0].decode_prefix_len
            self.update_status(room, KVPoll.WaitingForInput)

    def add_transfer_request(
        self,
        bootstrap_room: int,
        kv_indices: Any,
        index_slice: slice,
        is_last_chunk: bool,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        num_kv_tokens: int | None = None,
        *,
        wait_event: Any = None,
        indices_event: Any = None,
        trace_ctx: Any = None,
    ) -> None:
        """What a sender sends. Returns at once."""
        wanted = self.transfer_infos.get(bootstrap_room)
        if not wanted or self.request_status.get(bootstrap_room) == KVPoll.Failed:
            return
        if all(each.is_dummy for each in wanted.values()):
            if is_last_chunk:
                self.succeed(bootstrap_room)
            return
        try:
            self.core.sources.send(
                bootstrap_room,
                index_slice.start,
                np.asarray(kv_indices),
                is_last=is_last_chunk,
                aux_row=aux_index,
                states=rows_of(state_indices),
                fence=None if wait_event is None else wait_event.synchronize,
            )
        except KvxferError as error:
            self.core.sources.abort(bootstrap_room, str(error))
            self.fail(bootstrap_room, f"{error.code}: {error}")

    def _began(self, room: int) -> None:
        if room in self.request_status:
            self.update_status(room, KVPoll.Transferring)

    def _source_failed(self, room: int, code: str, text: str) -> None:
        self.fail(room, f"{code}: {text}")

    # --- decode ---

    def build_receiver_registration_message(self) -> Any:
        """The identity of this rank, and what its pages are; the receiver signs it."""
        core = self.core
        return greetings.Register(
            core.agent_id, self._rank(), core.export_metadata(), self.record, self.layout, self.shape
        )

    def build_receiver_metadata_message(
        self,
        *,
        bootstrap_room: int,
        required_dst_info_num: int,
        kv_indices: Any,
        aux_index: int | None,
        state_indices: list[Any] | None,
        decode_prefix_len: int | None,
        is_dummy: bool,
        device_kv_indices: Any = None,
    ) -> Any:
        """A room that was begun: how many pages of it this rank wants; the receiver signs it."""
        assert self.decode_side is not None
        return greetings.RoomRequest(
            bootstrap_room,
            self.decode_side.transfer_id(bootstrap_room),
            self.core.agent_id,
            self._rank(),
            len(kv_indices),
            required_dst_info_num,
            decode_prefix_len or 0,
            is_dummy,
        )

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Whether no read of ours into this room's pages is under way; prefill never writes them."""
        return self.core.destinations.is_drained(bootstrap_room)

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Whether it is known what that engine is. The scheduler does not wait: another thread asks."""
        return bootstrap_addr in self.prefill_info_table or self.engines.ensure(bootstrap_addr)

    def forget(self, bootstrap_addr: str) -> None:
        """What is known of that prefill engine is out of date: the next room asks its bootstrap server anew."""
        assert self.decode_side is not None
        with self.connection_lock:
            keys = [key for key in self.connection_pool if key.startswith(f"{bootstrap_addr}_")]
            infos = [info for key in keys for info in self.connection_pool.pop(key)]
            self.prefill_info_table.pop(bootstrap_addr, None)
        self.decode_side.forget([place_of(info) for info in infos])
        for info in infos:
            CommonKVReceiver.disconnect_endpoint(NetworkAddress(*place_of(info)).to_tcp())

    def _handle_node_failure(self, failed_bootstrap_addr: str) -> None:
        self.forget(failed_bootstrap_addr)
        super()._handle_node_failure(failed_bootstrap_addr)

    def _destination_failed(self, room: int, code: str, text: str) -> None:
        assert self.decode_side is not None
        self.decode_side.failed(room, code, text)

    def fail_rooms_of(self, bootstrap_addr: str, text: str) -> None:
        """Those that wait until it is known what that engine is."""
        for room in list(self.addr_to_rooms_tracker.get(bootstrap_addr, ())):
            if self.request_status.get(room) == KVPoll.Bootstrapping:
                self.fail(room, text)

    # --- within ---

    def _rank(self) -> int:
        return rank_of(self.kv_args, self.attn_tp_size)

    def _describe(self) -> None:
        self.record = dataclasses.replace(self.record, weights_fingerprint=self.weights.fingerprint)
        self.core.describe(self.record)
        why = self.weights.why
        if why is not None:  # what is not computed yet would be with other weights
            self.core.sources.fail_unsent(WeightsUnknownError(f"weights_fingerprint is not known: {why}"))

    def _hear(self) -> None:
        poller = zmq.Poller()
        poller.register(self.server_socket, zmq.POLLIN)
        dropped = RateLimitedWarning(log, "a message of another engine is dropped: %s")
        looked_s = 0.0
        while not self._stopping.is_set():
            if self._metrics is not None and time.monotonic() - looked_s >= LOOK_S:
                looked_s = time.monotonic()
                self._metrics.look(self.core.statistics())
            if not poller.poll(HEAR_MS):
                continue
            frames = self.server_socket.recv_multipart()
            if not greetings.is_ours(frames):  # of another backend, or SGLang's own: a room number proves nothing
                continue
            try:
                self._take(frames)
            except KvxferError as error:
                dropped.say(error)
            except Exception:
                log.exception("a message of another engine could not be taken")

    def _take(self, frames: list[bytes]) -> None:
        """What is not believed has no effect and no answer: any process may reach this socket, and would choose which
        peer this rank connects to."""
        greeting, mark = greetings.read(self._signer, frames)
        place = greetings.address_of(frames)
        if not self._correspondence.take(mark, place, greeting):
            log.debug("a message of %s is not for this process, or was taken before: %s", mark.by, greeting)
            return
        if self.prefill_side is not None:
            if isinstance(greeting, greetings.Register):
                self.prefill_side.register(greeting, place)
            elif isinstance(greeting, greetings.RoomRequest):
                self.prefill_side.want(greeting, place)
            elif isinstance(greeting, greetings.Abort):
                self.prefill_side.abort(greeting)
        elif self.decode_side is not None:
            if isinstance(greeting, greetings.Registered | greetings.Refused):
                self.decode_side.answered(greeting, place)
            elif isinstance(greeting, greetings.RoomFailed):
                self.decode_side.room_failed(greeting)
        for held in self._correspondence.release(place):
            self.tell(place, held)


class KvxferBootstrapServer(CommonKVBootstrapServer):  # type: ignore[misc]
    """SGLang's own: it says where ranks hear messages, and nothing that a room needs. It keeps the size of a page to
    itself: SGLang would refuse another one, and ranks compare what their pages hold by themselves."""

    page_size = property(lambda self: None, lambda self, value: None)


CLASSES = {
    "manager": KvxferManager,
    "sender": KvxferSender,
    "receiver": KvxferReceiver,
    "bootstrap_server": KvxferBootstrapServer,
}
"""By SGLang's `KVClassType`."""


def resolved(server_args: Any) -> SimpleNamespace:
    """All of SGLang's server arguments, as they are resolved."""
    view = resolving_view(server_args)
    return SimpleNamespace(**{name: getattr(view, name) for name in type(server_args).__struct_fields__})


def has_plain_pages() -> bool:
    """Whether SGLang's pools keep the tokens of a page one after the other, on this device."""
    kind, _, _ = str(get_device().device).partition(":")
    return kind in ("cpu", "cuda") and envs.SGLANG_AITER_KV_CACHE_LAYOUT.get().lower() == "nhd"


def rank_of(args: Any, tp_size: int) -> int:
    """Which of an engine's ranks it is: those of a pipeline stage have the numbers after those of the stage before."""
    return int(args.pp_rank) * int(tp_size) + int(args.engine_rank) % int(tp_size)


def stage_of(args: Any, model: Any, pp_size: int) -> tuple[int, int | None]:
    """The first layer of a rank's pipeline stage, and how many the model has; 0 and None where there is one stage."""
    if pp_size == 1:
        return 0, None
    layers = int(model.num_hidden_layers)
    named = list(getattr(args, "kv_layer_ids", None) or ())
    return int(named[0]) if named else get_pp_indices(layers, int(args.pp_rank), pp_size)[0], layers


def registered(args: Any, shape: KvShape | None) -> tuple[Layout, EngineMemory]:
    """What SGLang's KVArgs say of a rank's memory. Raises ConfigError for a component that is not moved."""
    names = tuple(str(kind.value) for kind in args.state_types)
    check_components(names, args.state_data_ptrs)
    layout = Layout(
        tuple(map(int, args.kv_item_lens)),
        tuple(map(int, args.aux_item_lens)),
        names,
        tuple(tuple(map(int, lens)) for lens in args.state_item_lens),
    )
    states = zip(names, args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
    device = str(get_device().device)
    memory = EngineMemory(
        buffers(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens),
        buffers(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens),
        tuple((name, buffers(ptrs, lens, items)) for name, ptrs, lens, items in states),
        int(args.gpu_id) if device.startswith("cuda") else None,
        shape,
    )
    return layout, memory


def buffers(addresses: Any, lengths: Any, items: Any) -> Buffers:
    """SGLang's three lists, which may be of numpy's integers."""
    return Buffers(tuple(map(int, addresses)), tuple(map(int, lengths)), tuple(map(int, items)))
