"""SGLang's servers as people start them, on a CPU with a tiny model, and a proxy that gives a request to two."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import aiohttp
from aiohttp import web
from ranks import free_port

READY_S = 400.0
"""A server is three processes of some seconds of imports each, on a host that does other things too."""
FLAGS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32"),
    *("--host", "127.0.0.1", "--mem-fraction-static", "0.3", "--max-total-tokens", "8192", "--page-size", "16"),
    *("--max-running-requests", "8", "--chunked-prefill-size", "256", "--grammar-backend", "none"),
    *("--disable-overlap-schedule", "--skip-server-warmup", "--log-level", "info", "--enable-metrics"),
]


def make_tiny_llama(path: pathlib.Path) -> pathlib.Path:
    """Random weights whose argmax is not always the same token, and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=2,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(path)
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokens.train_from_iterator(["hello world the quick brown fox"] * 4, trainer)
    names = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=tokens, **names).save_pretrained(path)
    return path


class Server:
    """``role``: prefill, decode, or nothing for one server that does both; of ``tp`` ranks, each on a processor of its
    own where there are several. It can be killed and started again."""

    def __init__(
        self, directory: pathlib.Path, model: pathlib.Path, role: str, *flags: str, bootstrap: int = 0, tp: int = 1
    ) -> None:
        self.name, self.port, self.bootstrap = f"{role or 'one'}{tp}", free_port(), bootstrap or free_port()
        self.log = directory / f"{self.name}.log"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), *FLAGS]
        command += ["--port", str(self.port), *flags]
        if role:
            command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "kvxfer"]
            command += ["--disaggregation-bootstrap-port", str(self.bootstrap)]
        if role == "decode":
            command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        self.environment = dict(os.environ)
        if tp > 1:
            command += ["--tp-size", str(tp)]
            self.environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, range(tp)))
        self.command = command
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self.environment,
            )

    def wait_ready(self) -> None:
        assert self.process is not None
        import requests

        begun_s = time.monotonic()
        while time.monotonic() - begun_s < READY_S:
            assert self.process.poll() is None, f"{self.name} ended; {self.last_words()}"
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/v1/models", timeout=2).status_code == 200:
                    return
            time.sleep(0.5)
        raise AssertionError(f"{self.name} did not become ready; {self.last_words()}")

    def kill(self) -> None:
        """With all that it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def last_words(self) -> str:
        return "\n  ".join([f"its log is {self.log}", *self.log.read_text(errors="replace").splitlines()[-25:]])


class Proxy:
    """Gives each request to a prefill and a decode server at once, with one room, and answers what decode answers."""

    def __init__(self, prefill: Server, decode: Server) -> None:
        self.prefill, self.decode, self.port = prefill, decode, free_port()
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()
        assert self._ready.wait(10)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        body |= {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.prefill.bootstrap,
            "bootstrap_room": random.getrandbits(62) + 1,
        }
        prefill, decode = (asyncio.ensure_future(self._post(server, body)) for server in (self.prefill, self.decode))
        status, answer = await decode
        if status != 200:
            prefill.cancel()  # SGLang gives up what nobody waits for
            return web.Response(status=status, body=answer)
        await prefill
        return web.Response(body=answer, content_type="application/json")

    async def _post(self, server: Server, body: dict[str, Any]) -> tuple[int, bytes]:
        try:
            async with self._client.post(f"{server.url}/generate", json=body) as answer:
                return answer.status, await answer.read()
        except aiohttp.ClientError as error:
            return 502, str(error).encode()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)

        async def main() -> None:
            self._client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
            app = web.Application(client_max_size=1 << 24)
            app.router.add_post("/generate", self._generate)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            self._ready.set()

        self._loop.run_until_complete(main())
        self._loop.run_forever()
