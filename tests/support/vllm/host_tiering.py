"""vLLM's tiering spec for an engine on the CPU. vLLM copies between an accelerator and its primary tier only, and
refuses a CPU; here its cache is host memory, and this copies. Scheduler, managers and tiers are vLLM's own.

Imported by vLLM. One block a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class HostWorker(OffloadingWorker):  # type: ignore[misc]
    """Copies at once, in the engine's thread: of each KV group the pages that its layers have."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion) -> None:
        self._region = region
        self._pairs = []
        for cache in kv_caches.tensors:
            pages = cache.tensor.view(torch.int8)
            self._pairs.append((pages, region.create_next_worker_view(cache.page_size_bytes)))
        self._groups = [sorted({ref.tensor_idx for ref in refs}) for refs in kv_caches.group_data_refs]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for pages, rows, blocks, chunks in self._parts(src_spec, dst_spec):
            rows[chunks] = pages[blocks]
        self._ended.append(TransferResult(job_id, True))
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        for pages, rows, blocks, chunks in self._parts(dst_spec, src_spec):
            pages[blocks] = rows[chunks]
        self._ended.append(TransferResult(job_id, True))
        return True

    def _parts(self, device: Any, host: Any) -> Any:
        at, blocks, chunks = 0, torch.from_numpy(device.block_ids).long(), torch.from_numpy(host.chunk_ids).long()
        for count, tensors in zip(device.group_sizes, self._groups, strict=True):
            for pages, rows in (self._pairs[number] for number in tensors):
                yield pages, rows, blocks[at : at + count], chunks[at : at + count]
            at += count

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
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = HostWorker(kv_caches, region)
        return self._worker
