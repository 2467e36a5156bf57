"""SGLang's real manager, sender, receiver and bootstrap server over memory of numpy's, both roles in one process.

Each rank has its own pages: a prefill rank's hold bytes of its own, a decode rank's are poisoned.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import pathlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

LAYERS, PAGES, HEADS, HEAD_BYTES = 4, 64, 2, 8
ROWS, AUX_BYTES = 16, (64, 64, 512)
POISON = 0xA5
PAGE_TOKENS = 16
WAIT_S = 10.0
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "torch_dtype": "float32",
}
BOOTSTRAP_S = 3


def make_model(path: pathlib.Path, weights: bytes = b"weights", **config: Any) -> pathlib.Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    (path / "model.safetensors").write_bytes(weights * 100)
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class World:
    """SGLang's context of this process, a bootstrap server, and the ranks that were made with them: one of each role,
    unless ``is_bare``."""

    def __init__(self, model: pathlib.Path, *, port: int = 0, serves: bool = True, is_bare: bool = False) -> None:
        self.model, self.port, self.serves, self.is_bare = model, port or free_port(), serves, is_bare
        self.rooms: Iterator[int] = itertools.count(int(time.time_ns() % 10**12) * 1000)
        self.ranks: list[Rank] = []
        self.told: dict[tuple[str, int], dict[int, Any]] = {}
        """What the first pipeline stages told the others."""

    def __enter__(self) -> World:
        os.environ.setdefault("SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT", str(BOOTSTRAP_S))
        os.environ.setdefault("SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL", "2")
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class
        from sglang.srt.runtime_context import get_context, get_parallel

        self.classes = {kind.value: get_kv_class(TransferBackend("kvxfer"), kind) for kind in KVClassType}
        self.override = get_context().override_server_args(
            host="127.0.0.1",
            disaggregation_bootstrap_port=self.port,
            disaggregation_transfer_backend="kvxfer",
            enable_trace=False,
            model_path=str(self.model),
            device="cpu",
            attention_backend="torch_native",
            dtype="float32",
        )
        self.arguments = self.override.install()
        group = SimpleNamespace(rank_in_group=0, world_size=1)
        ranks = ("tp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "attn_dcp_rank", "pp_rank", "dp_rank")
        groups = ("tp_group", "attn_tp_group", "pp_group")
        get_parallel().override_permanently(**dict.fromkeys(ranks, 0), **dict.fromkeys(groups, group))
        self.server = self.classes["bootstrap_server"]("127.0.0.1", self.port) if self.serves else None
        wait(lambda: not self.serves or is_heard(self.port))
        self.prefill = self.rank("prefill") if self.serves and not self.is_bare else None
        self.decode = None if self.is_bare else self.rank("decode")
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks:
            rank.stop()
        if self.server is not None:
            self.server.close()
        self.classes["receiver"].close_all_sockets()
        self.override.restore()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def rank(self, role: str, **changes: Any) -> Rank:
        self.ranks.append(Rank(self, role, **changes))
        return self.ranks[-1]

    def room(self) -> int:
        return next(self.rooms)


class Rank:
    """One rank of one role: the ``rank``-th of ``tp`` that share ``heads`` heads out (``heads=0``: of a latent that
    each holds), of the ``stage``-th of ``stages`` that share the layers out, with so many ``tokens`` in a page.
    ``environment``: of its settings. ``changes``: of its KVArgs."""

    def __init__(
        self,
        world: World,
        role: str,
        *,
        rank: int = 0,
        tp: int = 1,
        stage: int = 0,
        stages: int = 1,
        heads: int = HEADS,
        tokens: int = PAGE_TOKENS,
        environment: dict[str, str] | None = None,
        model: pathlib.Path | None = None,
        aux_bytes: Sequence[int] = AUX_BYTES,
        state_bytes: int = 0,
        state: str = "mamba",
        **changes: Any,
    ) -> None:
        from sglang.srt.disaggregation.base.conn import StateType
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.distributed.utils import get_pp_indices
        from sglang.srt.runtime_context import get_parallel

        from kvxfer.connectors.common.weights import Weights
        from kvxfer.connectors.sglang import adapter_0_5_23 as adapter

        self.world, self.role, self.tokens = world, role, tokens
        self.held = heads if heads == 0 else max(1, heads // tp)
        generator = np.random.default_rng(1)
        fresh = (
            (lambda shape: generator.integers(0, 255, shape, dtype=np.uint8))
            if role == "prefill"
            else (lambda shape: np.full(shape, POISON, np.uint8))
        )
        self.at, self.of = rank, tp
        self.stage, self.stages = stage, stages
        first, end = get_pp_indices(LAYERS, stage, stages)
        self.buffers = [layer + part * LAYERS for part in range(2 if heads else 1) for layer in range(first, end)]
        """Of those of the model, in its order, the ones that it has."""
        size = tokens * max(1, self.held) * HEAD_BYTES
        self.kv = [fresh((PAGES, size)) for _ in self.buffers]
        self.aux = [fresh((ROWS, size)) for size in aux_bytes]
        self.state = [fresh((ROWS, state_bytes))] if state_bytes else []
        args = world.classes["kvargs"]()
        values = dict(
            engine_rank=rank,
            pp_rank=stage,
            system_dp_rank=0,
            gpu_id=0,
            ib_device=None,
            kv_cache_dtype_str="float32",
            kv_layout=None,
            page_size=tokens,
            kv_layer_ids=[],
            state_types=[StateType(state)] if self.state else [],
            state_layer_ids=[],
            state_dim_per_tensor=[],
            prefill_start_layer=first,
            prefill_end_layer=end,
            kv_head_num=self.held,
            total_kv_head_num=heads,
        )
        for name, arrays in (("kv", self.kv), ("aux", self.aux)):
            ptrs, lens, items = described(arrays)
            values |= {f"{name}_data_ptrs": ptrs, f"{name}_data_lens": lens, f"{name}_item_lens": items}
        described_state = described(self.state)
        for name, value in zip(("ptrs", "lens", "item_lens"), described_state, strict=True):
            key = f"state_{name}" if name == "item_lens" else f"state_data_{name}"
            values[key] = [value] if self.state else []
        for name, value in (values | changes).items():
            setattr(args, name, value)
        mode = DisaggregationMode.PREFILL if role == "prefill" else DisaggregationMode.DECODE
        before = {name: os.environ.get(name) for name in environment or {}}
        os.environ.update(environment or {})
        real, arguments = adapter.Weights, world.arguments
        later = time.time_ns() + 10**18  # this process made the files, and did not load them
        adapter.Weights = functools.partial(Weights, started_ns=lambda: later)
        place = world.override._fields["model_path"]
        try:
            if model is not None:
                world.override.restore()
                world.override._fields["model_path"] = str(model)
                arguments = world.override.install()
            group = SimpleNamespace(rank_in_group=rank, world_size=tp)
            ranks, sizes = ("tp_rank", "attn_tp_rank"), ("tp_size", "attn_tp_size", "moe_tp_size")
            groups = {"tp_group": group, "attn_tp_group": group}
            told = world.told.setdefault((role, rank), {})  # by the first stage, which is made first
            stage_group = SimpleNamespace(
                rank_in_group=stage,
                world_size=stages,
                broadcast_object=lambda value, src: told.setdefault(src, value),
            )
            stage_of = {"pp_rank": stage, "pp_size": stages, "pp_group": stage_group}
            with get_parallel().override(
                **dict.fromkeys(ranks, rank), **dict.fromkeys(sizes, tp), **groups, **stage_of
            ):
                self.manager = world.classes["manager"](args, mode, arguments, heads == 0)
        finally:
            if model is not None:
                world.override.restore()
                world.override._fields["model_path"] = place
                world.arguments = world.override.install()
            adapter.Weights = real
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})

    def sender(self, room: int) -> Any:
        return self.world.classes["sender"](mgr=self.manager, bootstrap_addr=self.world.address, bootstrap_room=room)

    def receiver(self, room: int, address: str | None = None) -> Any:
        make = self.world.classes["receiver"]
        return make(mgr=self.manager, bootstrap_addr=address or self.world.address, bootstrap_room=room)

    def ask(self, room: int, pages: Sequence[int], row: int = 0, *, prefix: int = 0, state: Any = None) -> Any:
        """A receiver that has given its pages to the room, once prefill answered."""
        receiver = self.receiver(room)
        self.greet(receiver)
        give(receiver, pages, row, prefix=prefix, state=state)
        return receiver

    def greet(self, receiver: Any) -> None:
        wait(lambda: self.manager.try_ensure_parallel_info(receiver.bootstrap_addr))
        receiver.init(0)
        wait(lambda: receiver.poll() != BOOTSTRAPPING)

    def poison(self) -> None:
        for array in (*self.kv, *self.aux, *self.state):
            array[:] = POISON

    def stop(self) -> None:
        self.manager.teardown()


FAILED, BOOTSTRAPPING, WAITING, TRANSFERRING, SUCCESS = range(5)


def give(receiver: Any, pages: Sequence[int], row: int = 0, *, prefix: int = 0, state: Any = None) -> None:
    receiver.send_metadata(np.array(pages, np.int32), row, state or [], decode_prefix_len=prefix)


def start(sender: Any, pages: int, row: int = 0) -> int:
    """What SGLang does once decode's pages are known; the tokens that decode has already."""
    wait_for(sender, WAITING)
    prefix = sender.pop_decode_prefix_len()
    sender.init(pages, row)
    return int(prefix)


def send(sender: Any, pages: Sequence[int], state: Any = None) -> None:
    sender.send(np.array(pages, np.int32), state, num_kv_tokens=len(pages) * PAGE_TOKENS)


def described(arrays: Sequence[np.ndarray]) -> tuple[list[int], list[int], list[int]]:
    return [a.ctypes.data for a in arrays], [a.nbytes for a in arrays], [a.strides[0] for a in arrays]


def wait(is_so: Callable[[], Any], timeout_s: float = WAIT_S) -> float:
    """Seconds until it was so."""
    begun_s = time.monotonic()
    while not is_so():
        assert time.monotonic() - begun_s < timeout_s, "it did not come about"
        time.sleep(0.005)
    return time.monotonic() - begun_s


def wait_for(side: Any, status: int, timeout_s: float = WAIT_S) -> float:
    """Seconds until a sender or receiver says so. It must not fail otherwise."""
    begun_s = time.monotonic()
    while (now := side.poll()) != status:
        assert now != FAILED, reason(side)
        assert time.monotonic() - begun_s < timeout_s, f"status {now}, not {status}"
        time.sleep(0.005)
    return time.monotonic() - begun_s


def reason(side: Any) -> str:
    """Why it failed, as SGLang tells its client; it is cleared with that."""
    try:
        side.failure_exception()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "it says nothing"


def is_heard(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
