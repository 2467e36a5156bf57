"""What lies in each KV cache group of one engine of vLLM, read from vLLM's own tensors and block tables: which bytes a
source had when a prompt was computed, and which a destination had when vLLM heard that they are there.

Runs inside the engine's process, and asks no connector, so that it judges all of them alike. A digest is of one layer's
part of one block. Knows nothing of tests.
"""

from __future__ import annotations

import collections
import hashlib
from typing import Any

PROMPTS_MAX = 512
FILLER = 0x47
"""Of float32 51,015 and of bfloat16 50,944: far from any key or value, and no NaN, which masks do not stop."""


class GroupBytes:
    """Of one engine in one process. Make it before the engine, :meth:`watch` it afterwards."""

    def __init__(self) -> None:
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        self.caches: dict[str, list[Any]] = {}
        self.sent: collections.OrderedDict[str, list[dict[int, list[str]]]] = collections.OrderedDict()
        self.arrived: collections.OrderedDict[str, dict[str, Any]] = collections.OrderedDict()
        self.asked: dict[str, tuple[int, int]] = {}
        """Of each request: tokens that this engine had, and tokens with those that the connector said it brings."""
        allocate = GPUModelRunner.initialize_kv_cache_tensors

        def keep(*arguments: Any, **more: Any) -> Any:
            caches = allocate(*arguments, **more)
            self.caches = {
                name: list(cache) if isinstance(cache, list | tuple) else [cache] for name, cache in caches.items()
            }
            return caches

        GPUModelRunner.initialize_kv_cache_tensors = keep

    def watch(self, scheduler: Any, *, config: Any) -> None:
        """From now on keep what each prompt had, at both ends. ``config`` is vLLM's."""
        self.scheduler, self.config = scheduler, config
        connector = scheduler.connector
        if connector is None:
            return
        for name in ("request_finished", "request_finished_all_groups"):
            if hasattr(connector, name):
                setattr(connector, name, self._before_finish(getattr(connector, name)))
        ask, told = connector.get_num_new_matched_tokens, connector.update_connector_output

        def asked(request: Any, computed: int) -> Any:
            found = ask(request, computed)
            self.asked[request.request_id] = (computed, computed + (found[0] or 0))
            return found

        def output(found: Any) -> Any:
            for request_id in (found.finished_recving or set()) - (getattr(found, "failed_recving", None) or set()):
                self._keep_arrived(request_id)
            return told(found)

        connector.get_num_new_matched_tokens, connector.update_connector_output = asked, output

    def groups(self) -> dict[str, Any]:
        """``{"hybrid": whether vLLM's hybrid manager is on, "groups": [[class, layers, tokens a block, window]]}``, how
        many ``blocks`` there are, and ``block_bytes`` of one block of each group."""
        found, block_bytes = [], []
        for group in self.scheduler.kv_cache_config.kv_cache_groups:
            spec = group.kv_cache_spec
            window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None)
            found.append([type(spec).__name__, len(group.layer_names), spec.block_size, window])
            block_bytes.append(spec.page_size_bytes * len(group.layer_names))
        is_off = self.config.scheduler_config.disable_hybrid_kv_cache_manager
        blocks = self.scheduler.kv_cache_config.num_blocks
        return {"hybrid": is_off is False, "groups": found, "blocks": blocks, "block_bytes": block_bytes}

    def poison(self) -> None:
        """Overwrite every block. For an engine that is idle and keeps no prefixes."""
        import torch

        storages = {
            tensor.untyped_storage().data_ptr(): tensor for tensors in self.caches.values() for tensor in tensors
        }
        for tensor in storages.values():
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(FILLER)

    def zero(self, group: int) -> None:
        """Zero what the running requests have in one group."""
        import torch

        names = self.scheduler.kv_cache_config.kv_cache_groups[group].layer_names
        for request in self.scheduler.running:
            for block in filter(None, self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[group]):
                for tensor in (tensor for name in names for tensor in self.caches[name]):
                    tensor[self._rows(tensor, block)].view(torch.uint8).zero_()

    def _before_finish(self, call: Any) -> Any:
        def finished(request: Any, blocks: Any) -> Any:
            if (request.kv_transfer_params or {}).get("do_remote_decode"):
                tables = blocks if isinstance(blocks, tuple) else (blocks,)
                _keep(self.sent, request.request_id, self._digests(tables))
            return call(request, blocks)

        return finished

    def _keep_arrived(self, request_id: str) -> None:
        tables = self.scheduler.kv_cache_manager.get_block_ids(request_id)
        local, tokens = self.asked.pop(request_id, (0, 0))
        found = {"local": local, "tokens": tokens, "groups": self._digests(tables)}
        _keep(self.arrived, request_id, found)

    def _digests(self, tables: tuple[list[int], ...]) -> list[dict[int, list[str]]]:
        """For each group: by position in its block table, one digest a layer. Null blocks are left out."""
        if not self.caches:  # they are those of other processes: tensor parallel ranks
            return []
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        return [
            {
                position: [self._digest(name, block) for name in group.layer_names]
                for position, block in enumerate(table)
                if block
            }
            for group, table in zip(groups, tables, strict=True)
        ]

    def _digest(self, layer: str, block: int) -> str:
        import torch

        digest = hashlib.blake2b(digest_size=8)
        for tensor in self.caches[layer]:
            digest.update(tensor[self._rows(tensor, block)].contiguous().view(torch.uint8).numpy())
        return digest.hexdigest()

    def _rows(self, tensor: Any, block: int) -> slice:
        """An attention backend may cut one of vLLM's blocks into several."""
        each = tensor.shape[0] // self.scheduler.kv_cache_config.num_blocks
        return slice(block * each, (block + 1) * each)


def _keep(entries: collections.OrderedDict[str, Any], key: str, value: Any) -> None:
    entries[key] = value
    while len(entries) > PROMPTS_MAX:
        entries.popitem(last=False)
