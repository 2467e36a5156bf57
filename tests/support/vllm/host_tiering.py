"""vLLM's tiering spec for an engine on the CPU. vLLM copies between an accelerator and its primary tier only, and
refuses a CPU; here its cache is host memory, and this copies. Scheduler, managers and tiers are vLLM's own.

Imported by vLLM. One KV group, one block a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, in the engine's thread."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pairs = []
        for cache in kv_caches.tensors:
            pages = cache.tensor.view(torch.int8).view((-1, cache.page_size_bytes))
            self._pairs.append((pages, region.create_next_worker_view(cache.page_size_bytes)))
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for pages, rows in self._pairs:
            rows[torch.from_numpy(dst_spec.chunk_ids).long()] = pages[torch.from_numpy(src_spec.block_ids).long()]
        self._ended.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for pages, rows in self._pairs:
            pages[torch.from_numpy(dst_spec.block_ids).long()] = rows[torch.from_numpy(src_spec.chunk_ids).long()]
        self._ended.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._pairs.clear()
        self._region.cleanup()


class HostTieringSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """As its base, on a CPU."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region)
        return self._worker
