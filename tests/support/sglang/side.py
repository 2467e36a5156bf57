"""One role of one transfer backend of SGLang's in a process of its own, over memory of numpy's of any size: kvxfer, or
SGLang's `nixl` on whatever is called `nixl` there. benchmarks/sglang.py and test_e2e_nixl.py compare backends by it.

usage: python -m tests.support.sglang.side kvxfer|nixl prefill|decode PORT MODEL SHAPE

SHAPE is a Shape as JSON. Commands are JSON lines on stdin, answers on stdout; the first answer, "imported", comes by
itself. {"op": "begin"} makes its rank, and for prefill the bootstrap server at PORT. The others take one request's part
of the work, {"op": "serve", "request": {...}} for prefill and "fetch" for decode, from its begin to its end; "hold" is
prefill's part up to where pages would be sent; "poison" prepares decode's memory for a request, and "check" counts the
bytes that are wrong afterwards. "lanes" answers which lanes moved how many bytes. Times are of CLOCK_MONOTONIC, which
all processes of a host share.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.sglang.ranks import FAILED, POISON, SUCCESS, WAITING, described, give, is_heard, reason, send, wait

ROWS, AUX_BYTES = 16, (64, 64, 64, 64, 512, 512, 64, 128, 64, 64)
"""The auxiliary buffers that SGLang has for a plain model."""
POLL_S = 5e-4
"""Between two looks at a request."""
ASK_S, ASKS = 1.0, 15
"""How often, and how many times, SGLang's decode asks a prefill engine that it does not know yet."""
WAIT_S = 60.0
MEMORY_KIND = "SIDE_MEMORY_KIND"
"""What the backend `nixl` is told that the pages are: DRAM. SGLang's prefill does not say, and so means VRAM."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of the pages of one rank, in bfloat16: a buffer for K and one for V of each layer."""

    layers: int
    heads: int
    dim: int
    tokens: int
    """Of a page."""
    pages: int

    @property
    def page_bytes(self) -> int:
        """Of one page in one buffer."""
        return self.tokens * self.heads * self.dim * 2

    @property
    def token_bytes(self) -> int:
        """Of one token in all buffers."""
        return 2 * self.layers * self.heads * self.dim * 2

    def config(self) -> dict[str, Any]:
        """What a model's config says of it."""
        return dict(
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            head_dim=self.dim,
            hidden_size=self.heads * self.dim,
            torch_dtype="bfloat16",
        )


@dataclasses.dataclass(frozen=True)
class Request:
    """One request: a room, its pages and row on both sides, and how many pages each send has."""

    room: int
    sources: list[int]
    targets: list[int]
    row: int = 0
    chunks: list[int] = dataclasses.field(default_factory=list)

    def sends(self) -> list[list[int]]:
        sizes, at, parts = self.chunks or [len(self.sources)], 0, []
        for size in sizes:
            parts.append(self.sources[at : at + size])
            at += size
        assert at == len(self.sources)
        return parts


class Side:
    """A rank of ``role``. Both roles have the same bytes of reference; decode's memory begins poisoned."""

    def __init__(self, backend: str, role: str, port: int, model: pathlib.Path, shape: Shape) -> None:
        self.backend, self.role, self.port, self.shape = backend, role, port, shape
        random = np.random.default_rng(1)
        sizes = [(shape.pages, shape.page_bytes)] * (2 * shape.layers) + [(ROWS, size) for size in AUX_BYTES]
        self.truth = [np.frombuffer(random.bytes(rows * size), np.uint8).reshape(rows, size) for rows, size in sizes]
        self.own = [
            each.copy() if role == "prefill" else np.full_like(each, POISON) for each in self.truth
        ]  # pages first, then the auxiliary rows
        from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, TransferBackend, get_kv_class
        from sglang.srt.runtime_context import get_context, get_parallel

        self.classes = {kind.value: get_kv_class(TransferBackend(backend), kind) for kind in KVClassType}
        arguments = get_context().override_server_args(
            host="127.0.0.1",
            disaggregation_bootstrap_port=port,
            disaggregation_transfer_backend=backend,
            enable_trace=False,
            model_path=str(model),
            device="cpu",
            attention_backend="torch_native",
            dtype="bfloat16",
        )
        group = SimpleNamespace(rank_in_group=0, world_size=1)
        ranks = ("tp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "attn_dcp_rank", "pp_rank", "dp_rank")
        groups = ("tp_group", "attn_tp_group", "pp_group")
        get_parallel().override_permanently(**dict.fromkeys(ranks, 0), **dict.fromkeys(groups, group))
        installed = arguments.install()
        if role == "prefill":
            self.server = self.classes["bootstrap_server"]("127.0.0.1", port)
        wait(lambda: is_heard(port), WAIT_S)
        mode = DisaggregationMode.PREFILL if role == "prefill" else DisaggregationMode.DECODE
        self.manager = self.classes["manager"](self._args(), mode, installed, False)
        self.held: list[Any] = []

    @property
    def pages(self) -> list[np.ndarray]:
        return self.own[: 2 * self.shape.layers]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _args(self) -> Any:
        args, shape = self.classes["kvargs"](), self.shape
        values: dict[str, Any] = dict(
            engine_rank=0,
            pp_rank=0,
            system_dp_rank=0,
            gpu_id=0,
            ib_device=None,
            kv_cache_dtype_str="bfloat16",
            kv_layout=None,
            page_size=shape.tokens,
            kv_layer_ids=[],
            prefill_start_layer=0,
            prefill_end_layer=shape.layers,
            kv_head_num=shape.heads,
            total_kv_head_num=shape.heads,
        )
        states = ("types", "data_ptrs", "data_lens", "item_lens", "layer_ids", "dim_per_tensor")
        values |= {f"state_{name}": [] for name in states}
        for name, arrays in (("kv", self.pages), ("aux", self.own[2 * shape.layers :])):
            ptrs, lens, items = described(arrays)
            values |= {f"{name}_data_ptrs": ptrs, f"{name}_data_lens": lens, f"{name}_item_lens": items}
        if self.backend == "nixl":
            values["kv_data_mem_kinds"] = [os.environ.get(MEMORY_KIND, "DRAM")] * len(self.pages)
        for name, value in values.items():
            setattr(args, name, value)
        return args

    # --- prefill ---

    def open(self, request: Request) -> Any:
        """A sender whose reader's pages are known."""
        sender = self.classes["sender"](mgr=self.manager, bootstrap_addr=self.address, bootstrap_room=request.room)
        if poll_until(sender, lambda status: status in (FAILED, WAITING)) == WAITING:
            sender.pop_decode_prefix_len()
            sender.init(len(request.sources), request.row)
        return sender

    def hold(self, request: Request) -> None:
        self.held.append(self.open(request))

    def serve(self, request: Request) -> dict[str, Any]:
        """``sent_s`` is before the last send."""
        begun = Begun()
        sender = self.open(request)
        sent_s = 0.0
        for part in request.sends():
            sent_s = time.monotonic()
            send(sender, part)
        return self._ended(sender, begun) | {"sent_s": sent_s}

    # --- decode ---

    def fetch(self, request: Request) -> dict[str, Any]:
        begun = Begun()
        make = self.classes["receiver"]
        receiver = make(mgr=self.manager, bootstrap_addr=self.address, bootstrap_room=request.room)
        asked = 0
        while not self.manager.try_ensure_parallel_info(self.address):
            if (asked := asked + 1) == ASKS:
                receiver.abort()
            again_s = time.monotonic() + ASK_S
            while time.monotonic() < again_s and receiver.poll() != FAILED:
                time.sleep(POLL_S)
            if receiver.poll() == FAILED:
                return self._ended(receiver, begun)
        receiver.init(0)
        if poll_until(receiver, lambda status: status in (FAILED, WAITING)) == WAITING:
            give(receiver, request.targets, request.row)
        return self._ended(receiver, begun)

    def poison(self, request: Request) -> None:
        """Every byte that must arrive is set to its complement, all others to one value."""
        for mine, truth in zip(self.own, self.truth, strict=True):
            mine[:] = POISON
            here, there = self._of(mine, request)
            mine[here] = ~truth[there]

    def check(self, request: Request) -> int:
        """Bytes that are not what they must be: those that were to arrive, and all others."""
        wrong = 0
        for mine, truth in zip(self.own, self.truth, strict=True):
            here, there = self._of(mine, request)
            wrong += int((mine[here] != truth[there]).sum())
            others = np.ones(len(mine), bool)
            others[here] = False
            wrong += int((mine[others] != POISON).sum())
        return wrong

    def _of(self, array: np.ndarray, request: Request) -> tuple[list[int], list[int]]:
        is_row = len(array) == ROWS and array.shape[1] != self.shape.page_bytes
        return ([request.row], [request.row]) if is_row else (request.targets, request.sources)

    def lanes(self) -> dict[str, int]:
        core = getattr(self.manager, "core", None)
        return {} if core is None else {str(lane): count for lane, count in core.statistics().agent.bytes.items()}

    # --- both ---

    def _ended(self, side: Any, begun: Begun) -> dict[str, Any]:
        status = poll_until(side, lambda status: status in (FAILED, SUCCESS))
        answer = {"begun_s": begun.at_s, "ended_s": time.monotonic(), "cpu_s": time.process_time() - begun.cpu_s}
        answer["why"] = None if status == SUCCESS else reason(side)
        side.clear()
        return answer


class Begun:
    """When a request began, and the processor time of this process then."""

    def __init__(self) -> None:
        self.at_s, self.cpu_s = time.monotonic(), time.process_time()


def poll_until(side: Any, is_so: Callable[[int], bool]) -> int:
    end_s = time.monotonic() + WAIT_S
    while not is_so(status := int(side.poll())):
        assert time.monotonic() < end_s, f"it stays in status {status}"
        time.sleep(POLL_S)
    return status


def import_backend(backend: str) -> None:
    """Takes seconds. The wheel of NIXL is called `nixl_cu12`; SGLang imports `nixl`, which only refers to it."""
    if backend == "kvxfer":
        from sglang.srt.plugins import load_plugins

        load_plugins()
        importlib.import_module("kvxfer.connectors.sglang.adapter_0_5_23")
        return
    if importlib.util.find_spec("nixl") is None:
        for name in ("", "._api", "._bindings"):
            sys.modules["nixl" + name] = importlib.import_module("nixl_cu12" + name)
    importlib.import_module("sglang.srt.disaggregation.nixl.conn")


def main(backend: str, role: str, port: int, model: str, shape: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    import_backend(backend)
    answer("imported")
    side: Any = None
    for line in sys.stdin:
        command = json.loads(line)
        op = command.pop("op")
        if op == "begin":
            side = Side(backend, role, port, pathlib.Path(model), Shape(**json.loads(shape)))
            answer(None)
        else:
            arguments = [Request(**command["request"])] if "request" in command else []
            answer(getattr(side, op)(*arguments))
    os._exit(0)  # the backends' threads have no end


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5])
