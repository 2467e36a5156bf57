"""Engines of vLLM in processes of their own, on one coordinator, as objects of a test. Knows their command line
only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import uuid
from collections.abc import Awaitable
from typing import Any, TypeVar

from kvxfer.cli.progress import wait_while_it_gets_on
from tests.support.started import SILENT_S, Started, kvxfer, ready, told

T = TypeVar("T")

ROOT = pathlib.Path(__file__).resolve().parents[3]
PYTHON = pathlib.Path(os.environ.get("VLLM_VENV") or ROOT / "build" / "vllm-venv") / "bin" / "python"
"""vLLM's own; ``VLLM_VENV`` names another virtual environment, with another version of it."""
VLLM = PYTHON.with_name("vllm")
"""The command `vllm`, as its users start it."""
CACHE = PYTHON.parent.parent / "cache"
"""What vLLM found out about the model's class, for which it else starts a process."""
DRIVER = pathlib.Path(__file__).with_name("engine.py")
ANSWER_S = 60.0
KV_LEASE_S = float(os.environ.get("KV_LEASE_S", "4"))
"""Of the prefill engine: how long a prompt waits for a decode engine that gives no heartbeat."""


class Answer(dict[str, Any]):
    """What became of one request: ``tokens``, ``kv``, ``reason``, ``ms``, ``first_ms``."""

    @property
    def tokens(self) -> list[int]:
        return list(self["tokens"])

    @property
    def report(self) -> dict[str, Any]:
        """The connector's account of the load."""
        return dict((self["kv"] or {}).get("kvxfer", {}))


class Engine:
    """One engine. :meth:`start` begins to start it, :meth:`wait_ready` waits for that."""

    def __init__(self, name: str, log: pathlib.Path) -> None:
        self.name = name
        self.log = log
        self.process: asyncio.subprocess.Process | None = None
        self._done: dict[str, asyncio.Future[Answer]] = {}
        self._first: dict[str, asyncio.Event] = {}
        self._answers: asyncio.Queue[Any] = asyncio.Queue()
        self._ready = asyncio.Event()
        self._reader: asyncio.Task[None] | None = None

    async def start(self, options: dict[str, Any], environment: dict[str, str] | None = None) -> None:
        with self.log.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                str(PYTHON),
                str(DRIVER),
                json.dumps(options),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=1 << 26,
                env={**os.environ, "VLLM_CACHE_ROOT": str(CACHE), **(environment or {})},
                start_new_session=True,
            )
        self._reader = asyncio.create_task(self._read())

    async def wait_ready(self) -> None:
        """Raises AssertionError, with the end of its log, where it ends before, or does nothing any more."""
        assert self._reader is not None
        assert self.process is not None
        ready = asyncio.ensure_future(self._ready.wait())
        first = asyncio.wait({ready, self._reader}, return_when=asyncio.FIRST_COMPLETED)
        why = "it ended"
        try:
            await wait_while_it_gets_on(
                first,
                session=self.process.pid,
                written_bytes=lambda: self.log.stat().st_size,
                timeout_s=SILENT_S,
            )
        except TimeoutError as error:
            why = str(error)
        ready.cancel()
        assert self._ready.is_set(), told(self.name, f"did not become ready: {why}", self.log)

    def add(
        self,
        ids: list[int],
        n: int,
        kv: dict[str, Any] | None = None,
        request_id: str | None = None,
        lora: dict[str, Any] | None = None,
        *,
        apart: bool = False,
        sampling: dict[str, Any] | None = None,
    ) -> str:
        """Begin a request; its id, a new one unless it is given. ``lora``: its adapter's id, name and path.
        ``apart``: the prompt's last token is computed as a decode engine does; this one has nothing else to do.
        ``sampling``: more of vLLM's sampling parameters."""
        request_id = request_id or uuid.uuid4().hex
        self._done[request_id] = asyncio.get_running_loop().create_future()
        self._first[request_id] = asyncio.Event()
        self._send(op="add", id=request_id, ids=ids, n=n, kv=kv, lora=lora, apart=apart, sampling=sampling)
        return request_id

    async def wait(self, request_id: str, timeout_s: float = ANSWER_S) -> Answer:
        return await self._within(self._done[request_id], timeout_s, f"request {request_id}")

    async def wait_first(self, request_id: str) -> None:
        await self._within(self._first[request_id].wait(), ANSWER_S, f"the first token of request {request_id}")

    async def _within(self, answer: Awaitable[T], timeout_s: float, what: str) -> T:
        try:
            return await asyncio.wait_for(answer, timeout_s)
        except TimeoutError:
            raise AssertionError(told(self.name, f"did not answer {what} within {timeout_s:g} s", self.log)) from None

    async def generate(
        self,
        ids: list[int],
        n: int,
        kv: dict[str, Any] | None = None,
        request_id: str | None = None,
        lora: dict[str, Any] | None = None,
    ) -> Answer:
        return await self.wait(self.add(ids, n, kv, request_id, lora))

    async def load_lora(self, lora: dict[str, Any]) -> None:
        """As ``/v1/load_lora_adapter`` does."""
        self._send(op="lora", lora=lora)
        assert await asyncio.wait_for(self._answers.get(), ANSWER_S)

    async def rpc(self, method: str) -> None:
        """vLLM's ``collective_rpc``."""
        self._send(op="rpc", method=method)
        await asyncio.wait_for(self._answers.get(), ANSWER_S)

    async def abort(self, request_id: str) -> Answer:
        self._send(op="abort", id=request_id)
        return await self.wait(request_id)

    async def ask(self, what: str) -> Any:
        self._send(op="ask", what=what)
        return await self._within(self._answers.get(), ANSWER_S, f"what is {what}")

    def pause(self, seconds: float) -> None:
        """Sleep so long after each step from now on."""
        self._send(op="pause", s=seconds)

    def poison(self) -> None:
        """Overwrite every block of its cache. Only while it is idle, and without a prefix cache."""
        self._send(op="poison")

    def zero(self, group: int) -> None:
        """Zero what the running requests have in one KV cache group."""
        self._send(op="zero", group=group)

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    async def stop(self) -> None:
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGCONT)
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            await asyncio.wait_for(self.process.wait(), 20.0)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        if self._reader is not None:
            await self._reader

    def _send(self, **command: Any) -> None:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command).encode() + b"\n")

    async def _read(self) -> None:
        assert self.process is not None
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            event = json.loads(line)
            kind = event.pop("event")
            if kind == "ready":
                self._ready.set()
            elif kind == "first":
                self._first[event["id"]].set()
            elif kind == "answer":
                self._answers.put_nowait(event["value"])
            else:
                done = self._done[event["id"]]
                if not done.done():
                    done.set_result(Answer(event))


class Cluster:
    """A coordinator and engines by name. Leaving the context ends all of them."""

    def __init__(self, directory: pathlib.Path, model: pathlib.Path) -> None:
        self.directory = directory
        self.model = model
        self.engines: dict[str, Engine] = {}
        self._coordinator: Started | None = None
        self._address = ""

    async def __aenter__(self) -> Cluster:
        token = f"--token-file={self.directory / 'cluster-token'}"
        self._coordinator = Started("coordinator", kvxfer("coordinator", token), self.directory, dict(os.environ))
        try:
            self._address = (await ready(self._coordinator))["address"]
        except BaseException:
            self._coordinator.kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(engine.stop() for engine in self.engines.values()))
        if self._coordinator is not None:
            await asyncio.to_thread(self._coordinator.end)

    @property
    def address(self) -> str:
        """The coordinator's."""
        return self._address

    def __getitem__(self, name: str) -> Engine:
        return self.engines[name]

    async def start(
        self,
        name: str,
        role: str | None,
        *,
        extra: dict[str, Any] | None = None,
        policy: str = "recompute",
        transfer: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        pause_s: float = 0.0,
        **llm: Any,
    ) -> Engine:
        """Begin to start an engine; ``role`` is vLLM's kv_role, ``None`` for one without a connector. ``transfer``:
        vLLM's settings of another connector."""
        options = {"model": str(self.model), "max_model_len": 2048, "num_gpu_blocks_override": 64, **llm}
        if role is not None:
            settings = {
                "coordinator": self._address,
                "token_file": str(self.directory / "cluster-token"),
                "agent_id": name,
                "record_digests": True,
                **(extra or {}),
            }
            transfer = {
                "kv_connector": "KvxferConnector",  # known to vLLM by the plugin
                "kv_role": role,
                "kv_load_failure_policy": policy,
                "kv_connector_extra_config": settings,
            }
        engine = self.engines[name] = Engine(name, self.directory / f"{name}.log")
        await engine.start({"llm": options, "transfer": transfer, "pause_s": pause_s}, environment)
        return engine


async def hand_over(
    prefill: Engine,
    decode: Engine,
    ids: list[int],
    n: int,
    request_id: str | None = None,
    loras: tuple[dict[str, Any] | None, dict[str, Any] | None] = (None, None),
) -> tuple[Answer, Answer]:
    """One request the way any router does it: a prefill leg, then a decode leg with what it was answered. Each leg has
    an id of its own unless one is given for both. ``loras``: how each engine calls the request's adapter."""
    first = await prefill.generate(ids, 1, {"do_remote_decode": True, "do_remote_prefill": False}, request_id, loras[0])
    return first, await decode.generate(ids, n, first["kv"], request_id, loras[1])


def both_legs(
    prefill: Engine, decode: Engine, ranks: tuple[int, int] = (1, 1)
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What kvxfer's router gives the two legs of one attempt."""
    shared = {
        "transfer_id": uuid.uuid4().hex,
        "attempt": 1,
        "source": {"agent_id": prefill.name, "ranks": ranks[0], "address": ""},
        "destination": {"agent_id": decode.name, "ranks": ranks[1], "address": ""},
    }
    return (
        {"do_remote_decode": True, "do_remote_prefill": False, "role": "prefill", **shared},
        {"do_remote_decode": False, "do_remote_prefill": True, "role": "decode", **shared},
    )
