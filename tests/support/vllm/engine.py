"""One vLLM engine in this process, driven by JSON lines on stdin, answering on stdout. Run by vLLM's own Python.

usage: engine.py '{"llm": {...}, "transfer": {...} or null, "pause_s": 0.0}'

"pause_s" is slept after each step, so that a test finds a prompt half computed.

Commands: {"op": "add", "id", "ids", "n", "kv"}, {"op": "abort", "id"}, {"op": "pause", "s"}, {"op": "ask", "what":
"free" | "preempted" | "digests" | "rank digests" | "busy" | "moved" | "nixl" | "groups" | "sent" | "arrived"}, {"op":
"poison"}, {"op": "zero", "group"}, {"op": "lora", "lora"}, {"op": "rpc", "method"} (vLLM's collective_rpc); "add" may
have "lora": {"id", "name", "path"}, and "apart": the prompt's last token is computed as a decode engine does that was
given the others, in an engine that has nothing else to do, and "sampling": more of vLLM's sampling parameters. Events:
{"event": "ready"}, {"event": "first", "id"},
{"event": "done", "id", "tokens", "kv", "reason", "ms", "first_ms", "loaded_ms", "cached"},
{"event": "answer", "value"}.
"loaded_ms": until its KV was there, as vLLM's scheduler was told of it, by whatever connector. "rank digests": of every
rank, with `worker_digests.WorkerDigests`. "cached": tokens of the prompt that were not computed. "moved": what
NixlConnector says of its transfers, added up: {"bytes", "descriptors", "seconds"}. "groups", "sent", "arrived",
"poison", "zero": `group_bytes.GroupBytes`.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import sys
import time
from typing import Any

from tests.support.vllm.group_bytes import GroupBytes

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


def tell(**event: Any) -> None:
    print(json.dumps(event), file=answers, flush=True)


def lora_of(values: dict[str, Any] | None) -> Any:
    from vllm.lora.request import LoRARequest

    return values and LoRARequest(values["name"], values["id"], values["path"])


class Driver:
    """Commands in, engine steps between them, events out."""

    def __init__(self, options: dict[str, Any]) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        transfer = options["transfer"]
        self.pause_s = options["pause_s"]
        config = {} if transfer is None else {"kv_transfer_config": KVTransferConfig(**transfer)}
        self.group_bytes = GroupBytes()
        defaults = {"dtype": "float32", "distributed_executor_backend": "uni", "enforce_eager": True, "seed": 0}
        llm = LLM(disable_log_stats=True, **{**defaults, **options["llm"]}, **config)
        self.engine = llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.group_bytes.watch(self.scheduler, config=self.engine.vllm_config)
        self.begun: dict[str, float] = {}
        self.first: dict[str, float] = {}
        self.loaded: dict[str, float] = {}
        self.apart: set[str] = set()
        self.preempted = 0
        self.moved = {"bytes": 0, "descriptors": 0, "seconds": 0.0}
        self.preempt = self.scheduler._preempt_request
        self.scheduler._preempt_request = self.count_preemption
        if transfer is not None:
            self.told_by_worker = self.scheduler.connector.update_connector_output
            self.scheduler.connector.update_connector_output = self.watch_loads

    def count_preemption(self, *arguments: Any, **more: Any) -> None:
        self.preempted += 1
        self.preempt(*arguments, **more)

    def watch_loads(self, output: Any) -> None:
        now = time.perf_counter()
        self.loaded.update(dict.fromkeys(output.finished_recving or (), now))
        stats = getattr(output, "kv_connector_stats", None)
        told = stats.data if stats is not None else {}
        names = {"bytes": "bytes_transferred", "descriptors": "num_descriptors", "seconds": "transfer_duration"}
        for name, theirs in names.items():
            self.moved[name] += sum(told.get(theirs, ()))
        self.told_by_worker(output)

    def run(self) -> None:
        os.set_blocking(0, False)
        selector = selectors.DefaultSelector()
        selector.register(0, selectors.EVENT_READ)
        rest = b""
        tell(event="ready")
        while True:
            is_busy = self.scheduler.has_requests()
            if selector.select(0 if is_busy else None):
                data = os.read(0, 1 << 20)
                if not data:
                    return
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    self.obey(json.loads(line))
            if self.scheduler.has_requests():
                for output in self.engine.step():
                    self.told(output)
                time.sleep(self.pause_s)

    def obey(self, command: dict[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        if command["op"] == "add":
            extra = {"kv_transfer_params": command["kv"]} if command.get("kv") else None
            ids, is_apart = command["ids"], command.get("apart") and len(command["ids"]) > 1
            tokens = command["n"] + is_apart
            more = command.get("sampling") or {}
            params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, extra_args=extra, **more)
            self.begun[command["id"]] = time.perf_counter()
            prompt = TokensPrompt(prompt_token_ids=ids[:-1] if is_apart else ids)
            self.engine.add_request(command["id"], prompt, params, lora_request=lora_of(command.get("lora")))
            if is_apart:
                self.apart.add(command["id"])
                self.compute_all_but_last(ids[-1])
        elif command["op"] == "abort":
            self.engine.abort_request([command["id"]])
            tell(event="done", id=command["id"], tokens=[], kv=None, reason="abort", ms=0.0, first_ms=0.0)
        elif command["op"] == "lora":
            tell(event="answer", value=self.engine.add_lora(lora_of(command["lora"])))
        elif command["op"] == "rpc":
            self.engine.collective_rpc(command["method"])
            tell(event="answer", value=None)
        elif command["op"] == "poison":
            self.group_bytes.poison()
        elif command["op"] == "zero":
            self.group_bytes.zero(command["group"])
        elif command["op"] == "pause":
            self.pause_s = command["s"]
        else:
            tell(event="answer", value=self.answer(command["what"]))

    def compute_all_but_last(self, last: int) -> None:
        """The engine answers the prompt without its last token with just that token."""
        runner = self.engine.model_executor.driver_worker.model_runner
        sample = runner._sample

        def sample_last(*arguments: Any) -> Any:
            found = sample(*arguments)
            found.sampled_token_ids.fill_(last)
            return found

        runner._sample = sample_last
        [request] = self.scheduler.requests.values()
        while not request.num_output_tokens:
            self.engine.step()
        runner._sample = sample

    def answer(self, what: str) -> Any:
        if what == "free":
            return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        if what == "preempted":
            return self.preempted
        if what == "busy":
            return self.scheduler.has_requests()
        if what == "moved":
            return self.moved
        if what == "groups":
            return self.group_bytes.groups()
        if what in ("sent", "arrived"):
            return getattr(self.group_bytes, what)
        if what == "nixl":
            return sys.modules["nixl._api"].__file__
        if what == "rank digests":
            return self.engine.model_executor.collective_rpc("kv_digests")  # no call of an operator
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker_half.digests.as_dict()

    def told(self, output: Any) -> None:
        now = time.perf_counter()
        request_id, answer = output.request_id, output.outputs[0]
        if answer.token_ids and request_id not in self.first:
            self.first[request_id] = now
            tell(event="first", id=request_id)
        if output.finished:
            begun = self.begun.pop(request_id)
            loaded = [name for name in self.loaded if name.startswith(request_id)]
            tell(
                event="done",
                id=request_id,
                tokens=list(answer.token_ids)[request_id in self.apart :],
                kv=output.kv_transfer_params,
                reason=answer.finish_reason,
                ms=(now - begun) * 1e3,
                first_ms=(self.first.pop(request_id, now) - begun) * 1e3,
                cached=output.num_cached_tokens,
                loaded_ms=(self.loaded.pop(loaded[0]) - begun) * 1e3 if loaded else None,
            )


if __name__ == "__main__":
    Driver(json.loads(sys.argv[1])).run()
    from vllm.distributed.kv_transfer import kv_transfer_state

    kv_transfer_state.ensure_kv_transfer_shutdown()
    gc.freeze()  # to look at all that vLLM imported once more takes seconds
