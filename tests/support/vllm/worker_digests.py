"""What vLLM's workers say of the pages that they sent and received, where they run in processes of their own."""

from __future__ import annotations


class WorkerDigests:
    """vLLM's ``worker_extension_cls``."""

    def kv_digests(self) -> dict[str, list[list[str]]]:
        """As `Digests.as_dict`, of this rank's layers."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        found: dict[str, list[list[str]]] = get_kv_transfer_group().worker_half.digests.as_dict()
        return found
