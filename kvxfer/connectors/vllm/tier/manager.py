"""The tier as vLLM 0.32 calls it. Decides how vLLM's calls become jobs, and how their ends become vLLM's; what is
stored where is the store's.

All calls come from the scheduler's thread, and none but ``drain_jobs`` and ``shutdown`` waits.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvxfer.agent import Agent
from kvxfer.config import AgentConfig
from kvxfer.connectors.common.weights import Weights
from kvxfer.connectors.tier.file_store import FileStore
from kvxfer.connectors.tier.jobs import TierJobs
from kvxfer.connectors.tier.pool_store import PoolStore
from kvxfer.connectors.tier.store import BlockStore, Presence, Rows
from kvxfer.connectors.vllm.loaded import LOADED
from kvxfer.connectors.vllm.models import models_of
from kvxfer.connectors.vllm.tier.engines import configuration_of
from kvxfer.connectors.vllm.tier.facts import engine_record, record_digest
from kvxfer.connectors.vllm.tier.options import TierOptions
from kvxfer.errors import IncompatibleError, WeightsUnknownError
from kvxfer.rpc import load_token

log = logging.getLogger("kvxfer.tier")

RESULTS = {
    Presence.HERE: LookupResult.HIT,
    Presence.ABSENT: LookupResult.MISS,
    Presence.ASKED: LookupResult.RETRY,
}
PREFIX = "vllm:kvxfer_tier_"
COUNTERS = {
    "hits": "Blocks that a request asked for the first time and that the tier had.",
    "misses": "Blocks that a request asked for the first time and that the tier did not have.",
    "saved_blocks": "Blocks that were stored.",
    "saved_bytes": "Bytes that were stored.",
    "loaded_blocks": "Blocks that came back.",
    "loaded_bytes": "Bytes that came back.",
}
GAUGES = {
    "blocks": "Blocks that the tier has now, where it knows.",
    "used_bytes": "Bytes that they take.",
    "capacity_bytes": "Bytes that they may take.",
    "evictions": "Blocks that the tier evicted since it was opened.",
}
ERRORS = PREFIX + "errors"


class KvxferTier(SecondaryTierManager):  # type: ignore[misc]
    """See docs/tiers.md."""

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **settings: Any,
    ) -> None:
        """``settings``: see :class:`~kvxfer.connectors.vllm.tier.options.TierOptions`. Raises ConfigError."""
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        options = TierOptions.of(settings)
        is_file = options.store == "file"
        self.medium = Medium.STORAGE if is_file else Medium.CPU
        self.cache_hit_source = CacheHitSource.DISK if is_file else CacheHitSource.P2P
        self.locality = Locality(settings.get("locality", "LOCAL" if is_file else "REMOTE"))
        rows: Rows = np.asarray(primary_kv_view).view(np.uint8)
        rows = rows.reshape(rows.shape[0], -1)
        config = offloading_spec.config
        self._weights: Weights | None = None
        self._why, self._record = "", ""
        self._describe(config, rows.shape[1])
        self._jobs = TierJobs(make_store(options, rows, config), rows.shape[1], self._digest)

    def _describe(self, config: Any, row_bytes: int) -> None:
        """Find out what this engine's blocks are."""
        known = configuration_of(str(config.engine_id))
        if known is None:
            self._why = "the engine's configuration is not known: is vLLM's plugin 'kvxfer' switched off?"
            log.warning("nothing will be stored or loaded: %s", self._why)
            return
        vllm_config, kv_cache_config = known
        self._record = engine_record(vllm_config, kv_cache_config, config, row_bytes, platform_facts(vllm_config))
        self._weights = Weights(functools.partial(models_of, vllm_config), loaded=LOADED)

    def _digest(self) -> bytes:
        if self._weights is None:
            raise IncompatibleError(self._why)
        fingerprint, why = self._weights.fingerprint, self._weights.why
        if why is not None:
            raise WeightsUnknownError(why, field="weights_fingerprint")
        return _digest_of(self._record, fingerprint, hash_root())

    # --- what the scheduler asks ---

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        return RESULTS[self._jobs.find(req_context.req_id, bytes(key))]

    def submit_store(self, job_metadata: TransferJob) -> None:
        job, rows = job_metadata, job_metadata.chunk_ids.tolist()
        self._jobs.save(job.job_id, job.req_context.req_id, list(job.keys), rows)

    def submit_load(self, job_metadata: TransferJob) -> None:
        job, rows = job_metadata, job_metadata.chunk_ids.tolist()
        self._jobs.load(job.job_id, job.req_context.req_id, list(job.keys), rows)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        return [
            JobResult(
                end.job_id,
                end.is_success,
                None if end.is_success else tuple(OffloadKey(key) for key in end.good_keys),
                end.seconds,
                end.moved_bytes,
            )
            for end in self._jobs.take_ended()
        ]

    def has_pending_work(self) -> bool:
        return self._jobs.has_work

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._jobs.request_over(req_context.req_id)

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """A request's blocks count as used when it is over."""

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._jobs.step_over()

    def drain_jobs(self) -> None:
        self._jobs.drain()

    def shutdown(self) -> None:
        if self._weights is not None:
            self._weights.stop()
        self._jobs.close()

    # --- metrics ---

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        found: dict[str, OffloadingMetricMetadata] = {
            PREFIX + name: OffloadingCounterMetadata(documentation=text) for name, text in COUNTERS.items()
        }
        found |= {PREFIX + name: OffloadingGaugeMetadata(documentation=text) for name, text in GAUGES.items()}
        text = "Blocks that could not be saved, loaded or found, by the error's stable code."
        return found | {ERRORS: OffloadingCounterMetadata(documentation=text, labelnames=("tried", "code"))}

    def get_stats(self) -> OffloadingConnectorStats | None:
        counts, figures = self._jobs.counter.take(), self._jobs.store.figures()
        stats = OffloadingConnectorStats()
        for name in COUNTERS:
            if value := getattr(counts, name):
                stats.increase_counter(PREFIX + name, value)
        for (tried, code), value in counts.errors.items():
            stats.increase_counter(ERRORS, value, (tried, code))
        if not stats.is_empty():
            for name in GAUGES:
                stats.set_gauge(PREFIX + name, getattr(figures, name))
        return stats


@functools.lru_cache(maxsize=8)
def _digest_of(record: str, fingerprint: str, root: bytes) -> bytes:
    return record_digest(record, fingerprint, root)


def hash_root() -> bytes:
    """What vLLM's chains of block hashes begin with; it is set once the scheduler is there. Raises IncompatibleError
    before."""
    from vllm.v1.core import kv_cache_utils

    root = getattr(kv_cache_utils, "NONE_HASH", None)
    if root is None:
        raise IncompatibleError("vLLM has not said yet what its block hashes begin with")
    return bytes(root)


def make_store(options: TierOptions, rows: Rows, config: Any) -> BlockStore:
    """The store that the options ask for. Raises ConfigError."""
    if options.store == "file":
        parallel = config.parallel
        path = options.path
        if parallel.data_parallel_size > 1:
            path = os.path.join(path, f"dp{parallel.data_parallel_index}")
        return FileStore(rows, path, options.capacity_bytes, threads=options.threads)
    agent = Agent(
        options.agent_id or f"tier-engine-{secrets.token_hex(8)}",
        coordinator=options.coordinator or None,
        token=load_token(options.token_file) if options.token_file else None,
        config=AgentConfig(
            bind_host=options.bind_host,
            advertise_host=options.advertise_host,
            insecure=options.insecure,
            coordinator_ca_file=options.coordinator_ca_file,
            coordinator_cert_file=options.coordinator_cert_file,
            coordinator_key_file=options.coordinator_key_file,
            discovery=not options.coordinator,
            lanes=options.lanes,
            transfer_deadline_s=options.deadline_s,
            stall_s=0.5,
            reconnect_s=1.0,
        ),
    )
    return PoolStore(
        rows,
        agent,
        options.service,
        service_url=options.service_url,
        lookup_wait_s=options.lookup_wait_s,
        deadline_s=options.deadline_s,
        window=options.window,
    )


def platform_facts(vllm_config: Any) -> dict[str, str]:
    """What vLLM's code runs on, what chooses the order of bytes within its pages, and how it hashes tokens."""
    import vllm
    from vllm.platforms import current_platform

    facts = {
        "vllm": str(vllm.__version__),
        "device": str(current_platform.device_type),
        "hash": str(vllm_config.cache_config.prefix_caching_hash_algo),
    }
    if current_platform.is_cpu():
        from vllm.v1.attention.backends import cpu_attn

        model, cache = vllm_config.model_config, vllm_config.cache_config
        facts["isa"] = str(cpu_attn._get_attn_isa(model.dtype, cache.block_size, model.get_head_size()))
    else:
        facts["device_name"] = str(current_platform.get_device_name())
    return facts
