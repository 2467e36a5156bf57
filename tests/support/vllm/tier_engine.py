"""One vLLM engine with vLLM's offloading and a tier of kvxfer's, in this process, driven by JSON lines on stdin. Run by
vLLM's own Python.

usage: tier_engine.py '{"llm": {...}, "cpu_bytes": N, "tiers": [{...}]}'

Commands: {"op": "generate", "ids", "n"}: answers {"tokens", "cached"}, after all that the tier has to do is done;
{"op": "counts"}: the tier's counts and vLLM's own metrics of cached tokens; {"op": "wait_known"}: until the weights are
known; {"op": "changed"}: weights in memory are changed; {"op": "strike", "on", "after", "pid", "number"}: that process
gets that signal once so many blocks more were loaded or saved; {"op": "wait_attached", "timeout_s"}: until the tier's
service knows this engine; {"op": "groups"}: what vLLM's KV cache groups are, and the tokens of their blocks. "cached":
tokens of the prompt that vLLM did not compute.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM prints what it likes
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_NO_USAGE_STATS="1",
    DO_NOT_TRACK="1",
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")


class TierEngine:
    """One command after the other."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        extra = {
            "spec_name": "HostTieringSpec",
            "spec_module_path": "tests.support.vllm.host_tiering",
            "cpu_bytes_to_use": options["cpu_bytes"],
            "secondary_tiers": options["tiers"],
        }
        transfer = None
        if options["tiers"]:
            transfer = KVTransferConfig(
                kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
            )
        self.llm = LLM(
            enforce_eager=True,
            seed=0,
            disable_log_stats=False,
            kv_transfer_config=transfer,
            **{"dtype": "float32", "distributed_executor_backend": "uni", **options["llm"]},
        )
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.tiers = []
        if transfer is not None:
            self.tiers = self.scheduler.connector.connector_scheduler.manager.secondary_tiers

    def generate(self, command: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams

        began_s = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_tokens=command["n"], ignore_eos=True, detokenize=False)
        (output,) = self.llm.generate([{"prompt_token_ids": command["ids"]}], sampling, use_tqdm=False)
        ms = 1000 * (time.perf_counter() - began_s)
        while self.scheduler.has_requests():
            self.engine.step()
        for tier in self.tiers:
            tier.drain_jobs()
        return {"tokens": list(output.outputs[0].token_ids), "cached": output.num_cached_tokens, "ms": ms}

    def wait_known(self, command: dict[str, Any]) -> dict[str, Any]:
        return {"why": [tier._weights.wait(60) and tier._weights.why for tier in self.tiers]}

    def changed(self, command: dict[str, Any]) -> dict[str, Any]:
        self.llm.collective_rpc("reload_weights")
        return {}

    def strike(self, command: dict[str, Any]) -> dict[str, Any]:
        store, name, left = self.tiers[0]._jobs.store, f"_{command['on']}", command["after"]
        act = getattr(store, name)

        async def struck(move: Any) -> None:
            nonlocal left
            if not left:
                os.kill(command["pid"], command["number"])
                setattr(store, name, act)
            left -= 1
            await act(move)

        setattr(store, name, struck)
        return {}

    def wait_attached(self, command: dict[str, Any]) -> dict[str, Any]:
        return {"is_attached": self.tiers[0]._jobs.store.wait_known(command["timeout_s"])}

    def groups(self, command: dict[str, Any]) -> dict[str, Any]:
        groups = self.scheduler.kv_cache_config.kv_cache_groups
        specs = [group.kv_cache_spec for group in groups]
        return {"groups": [type(spec).__name__ for spec in specs], "block_tokens": [spec.block_size for spec in specs]}

    def counts(self, command: dict[str, Any]) -> dict[str, Any]:
        found = []
        for tier in self.tiers:
            counts, figures = tier._jobs.counter.total(), tier._jobs.store.figures()
            errors = {f"{tried} {code}": count for (tried, code), count in counts.errors.items()}
            found.append({**vars(counts), "errors": errors, "figures": figures.__dict__})
        metrics: dict[str, float] = {}
        for metric in self.llm.get_metrics():
            if metric.name.startswith("vllm:kvxfer_tier") or "cached" in metric.name:
                labels = ",".join(
                    f"{k}={v}" for k, v in sorted(metric.labels.items()) if k not in ("engine", "model_name")
                )
                metrics[f"{metric.name}{{{labels}}}"] = getattr(metric, "value", 0)
        return {"tiers": found, "metrics": metrics}

    def run(self) -> None:
        print(json.dumps({"event": "ready"}), file=answers, flush=True)
        for line in sys.stdin:
            command = json.loads(line)
            print(json.dumps(getattr(self, command["op"])(command)), file=answers, flush=True)


if __name__ == "__main__":
    TierEngine(json.loads(sys.argv[1])).run()
