"""The class that vLLM loads. It only forwards each call to the scheduler half or the worker half.

vLLM makes one in the scheduler's process and one in each worker's. For differences between vLLM's versions this class
checks which names vLLM has, not the version number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import secrets
import sys
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import base

from kvxfer.agent import Agent
from kvxfer.connectors.common.ids import rank_agent
from kvxfer.connectors.common.weights import Weights
from kvxfer.connectors.vllm.adapters import Adapters
from kvxfer.connectors.vllm.groups import GroupKind
from kvxfer.connectors.vllm.identity import EngineWeights, share, unshare
from kvxfer.connectors.vllm.limits import check_engine, check_groups, groups_of
from kvxfer.connectors.vllm.loaded import LOADED
from kvxfer.connectors.vllm.metrics import KvxferPromMetrics, KvxferStats
from kvxfer.connectors.vllm.models import models_of
from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.connectors.vllm.parallel import check_parallel, ranks_of, stages_text, this_rank, total_heads
from kvxfer.connectors.vllm.record import make_record
from kvxfer.connectors.vllm.scheduler import SchedulerHalf
from kvxfer.connectors.vllm.steps import News, Report, StepOrders
from kvxfer.connectors.vllm.tracing import vllm_sink
from kvxfer.connectors.vllm.watch import watch_vllm
from kvxfer.connectors.vllm.worker import Results, WorkerHalf
from kvxfer.observe import hide, log_in_host_program, spans_to
from kvxfer.types import Incarnation, TransferId, WorkerInfo

_WorkerMetadata: type[Any] = getattr(base, "KVConnectorWorkerMetadata", object)
_TransferResults: Any = getattr(base, "KVConnectorTransferResults", None)


@dataclasses.dataclass
class KvxferMetadata(base.KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler half to the worker half."""

    orders: StepOrders


@dataclasses.dataclass
class KvxferReports(_WorkerMetadata):  # type: ignore[misc]
    """From the worker half to the scheduler half."""

    reports: tuple[Report, ...]
    news: tuple[News, ...] = ()

    def aggregate(self, other: KvxferReports) -> KvxferReports:
        return KvxferReports(self.reports + other.reports, self.news + other.news)


@dataclasses.dataclass
class KvxferHandshake(base.KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """From the worker half to the scheduler half, once: the incarnation of this rank's agent, its signed metadata with
    option ``discovery``, and why it does not know its weights, if it does not."""

    agent_id: str
    incarnation: Incarnation
    agent_metadata: str
    weights_why: str | None


class KvxferConnector(base.KVConnectorBase_V1, base.SupportsHMA):  # type: ignore[misc]
    """vLLM's KV connector on kvxfer's agent."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        log_in_host_program()
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        options = ConnectorOptions.from_config(
            transfer.kv_role, transfer.engine_id, transfer.kv_connector_extra_config or {}
        )
        options.check_front_end(parallel)
        check_engine(vllm_config)
        groups = groups_of(kv_cache_config)
        check_groups(kv_cache_config, vllm_config, base.KVConnectorBase_V1)
        check_parallel(vllm_config, groups, base.KVConnectorBase_V1)
        self._kinds = {group.kind for group in groups.groups}
        ranks, stages = ranks_of(parallel), stages_text(vllm_config)
        options.check_ranks(ranks)
        self._scheduler_half: SchedulerHalf | None = None
        self._worker_half: WorkerHalf | None = None
        self._last = Results()
        self._reports: tuple[Report, ...] = ()
        self._handled: BaseException | None = None
        """The exception that vLLM was handling when the step began, or ``None``; see :meth:`wait_for_save`."""
        self._news: News | None = None
        self._ending = contextlib.ExitStack()
        agents = tuple(rank_agent(options.agent_id, rank) for rank in range(ranks))
        self._engine_weights = EngineWeights(agents)
        if role == base.KVConnectorRole.SCHEDULER:
            adapters = Adapters(ranks, str(getattr(getattr(vllm_config, "lora_config", None), "lora_dtype", "")))
            self._engine_weights.listen()
            self._ending.callback(self._engine_weights.stop)
            self._ending.callback(adapters.stop)
            self._scheduler_half = SchedulerHalf(
                options,
                groups=groups,
                agents=agents,
                stages=stages,
                mint=lambda: TransferId(secrets.token_bytes(16)),
                adapter_fingerprint=adapters.fingerprint,
                weights_why=self._engine_weights.why_unknown,
                adapter_was_another=adapters.was_another,
                will_fail=getattr(transfer, "kv_load_failure_policy", "fail") == "fail",
            )
            return
        rank = this_rank()
        watch_vllm()  # the earliest place, if vLLM does not load kvxfer's plugin
        weights = Weights(functools.partial(models_of, vllm_config), loaded=LOADED)
        share(agents[rank], weights)
        self._ending.callback(unshare, agents[rank], weights)
        self._worker_half = WorkerHalf(
            options,
            functools.partial(make_record, vllm_config, kv_cache_config, groups),
            model=_served_name(vllm_config.model_config),
            rank=rank,
            ranks=ranks,
            stages=stages,
            heads=total_heads(vllm_config),
            new_agent=functools.partial(_new_agent, options, rank),
            max_context_tokens=vllm_config.model_config.max_model_len,
            groups=() if groups.is_plain else tuple(group.layers for group in groups.groups),
            blocks=kv_cache_config.num_blocks,
            weights=weights,
        )
        sink = vllm_sink(vllm_config)
        if sink is not None:
            self._ending.enter_context(spans_to(sink))

    @property
    def _scheduler(self) -> SchedulerHalf:
        assert self._scheduler_half is not None, "vLLM called a scheduler's method in a worker"
        return self._scheduler_half

    @property
    def _worker(self) -> WorkerHalf:
        assert self._worker_half is not None, "vLLM called a worker's method in the scheduler"
        return self._worker_half

    @property
    def worker_half(self) -> WorkerHalf:
        """For tests and tools in the worker's process."""
        return self._worker

    # --- the worker ---

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._worker.register(kv_caches)

    def get_handshake_metadata(self) -> KvxferHandshake:
        worker = self._worker
        return KvxferHandshake(worker.agent_id, worker.incarnation, worker.agent_metadata, worker.weights_why)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Called before anything of a step is written, whether something was preempted or not."""
        if isinstance(kv_connector_metadata, KvxferMetadata):
            self._worker.begin_step(kv_connector_metadata.orders)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._handled = sys.exc_info()[1]
        self._worker.begin_step(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads began with the step, before its forward."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """A request runs only once all of its blocks are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        self._worker.layer_saved(layer_name)

    def wait_for_save(self) -> None:
        """vLLM calls this in a ``finally``, so also after a forward that raised. The exception that is being handled is
        then another than when the step began."""
        if sys.exc_info()[1] is self._handled:
            self._worker.step_saved()
        else:
            self._worker.step_failed()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = self._take_results()
        return _TransferResults(
            finished_sending=results.sent, finished_recving=results.received, failed_recving=results.failed
        )

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """vLLM versions without get_transfer_results call this instead."""
        results = self._take_results()
        return results.sent or None, results.received or None

    def _take_results(self) -> Results:
        """Take the worker's results of this step, and keep them for the calls that vLLM makes after this one."""
        self._last = self._worker.results()
        self._reports = self._worker.reports()
        self._news = self._worker.news()
        return self._last

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Versions with get_transfer_results learn of failures by request; the others learn here, by block."""
        return set() if _TransferResults is not None else self._last.bad_blocks

    def build_connector_worker_meta(self) -> Any:
        news = () if self._news is None else (self._news,)
        return KvxferReports(self._reports, news) if self._reports or news else None

    def get_kv_connector_stats(self) -> Any:
        if self._worker_half is None:
            half = self._scheduler
            stats = KvxferStats.of(half.take_ended(), 0, half.take_waited(), half.take_revoked(), half.take_gauges())
        else:
            stats = KvxferStats.of((), self._worker_half.take_expired())
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        if self._worker_half is not None:
            self._worker_half.shutdown()
        self._ending.close()

    # --- the scheduler ---

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self._know_ranks([metadata[rank] for rank in sorted(metadata)])

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """By stage and tensor rank."""
        self._know_ranks([metadata[place] for place in sorted(metadata)])

    def _know_ranks(self, found: list[Any]) -> None:
        ranks = [rank for rank in found if isinstance(rank, KvxferHandshake)]  # MultiConnector gives one's to all
        agent_metadata = tuple(rank.agent_metadata for rank in ranks if rank.agent_metadata)
        self._scheduler.set_incarnations(tuple(rank.incarnation for rank in ranks), agent_metadata)
        for rank in ranks:
            self._engine_weights.tell(rank.agent_id, rank.weights_why)

    def on_new_request(self, request: Any) -> None:
        self._scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count = self._scheduler.matched(request, num_computed_tokens)
        return count, bool(count)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A state is always loaded, however much of full attention vLLM has in its own cache. Windows are loaded from
        where that ends."""
        return self._kinds <= {GroupKind.FULL, GroupKind.STATE}

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KvxferMetadata:
        return KvxferMetadata(self._scheduler.build(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        reports = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(reports, KvxferReports):
            self._scheduler.reported(reports.reports)
            for news in reports.news:
                self._engine_weights.tell(news.agent_id, news.weights_why)
                self._scheduler.set_agent_metadata(news.agent_id, news.agent_metadata)
                LOADED.take(news.adapters)
                self._scheduler.stands(news.standings)
                self._scheduler.read(news.read)
        self._scheduler.received(connector_output.finished_recving or ())
        self._scheduler.sent(connector_output.finished_sending or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._scheduler.finished(request, block_ids)

    # --- the class ---

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        """False: kvxfer has no sleep mode. check_engine refuses it in versions that do not call this."""
        return False

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """With ``overlap``, Python announces each layer when it is written, which a full CUDA graph would not run."""
        return bool(extra_config.get("overlap", True))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvxferStats:
        return KvxferStats() if data is None else KvxferStats(data=data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, Any]
    ) -> KvxferPromMetrics:
        return KvxferPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


def _served_name(model_config: Any) -> str:
    name = model_config.served_model_name
    return str(name[0] if isinstance(name, list) and name else name or model_config.model)


def _new_agent(options: ConnectorOptions, rank: int, info: WorkerInfo) -> Agent:
    from kvxfer.rpc import token_beside

    token = token_beside("" if options.discovery else options.coordinator_cert_file, options.token_file)
    hide(token)
    return Agent(info, coordinator=options.coordinator or None, token=token, config=options.agent_config(rank))
