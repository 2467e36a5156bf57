"""How SGLang's servers and its router are started on a CPU: their command lines, their environment, a tiny model. Knows
no process; importing it imports nothing of SGLang.
"""

from __future__ import annotations

import os
import pathlib

STUBS = pathlib.Path(__file__).resolve().parent / "stubs"
ENVIRONMENT = {
    "SGLANG_HOST_IP": "127.0.0.1",
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "no_proxy": "127.0.0.1,localhost",
}
FLAGS = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--dtype", "float32"),
    *("--host", "127.0.0.1", "--mem-fraction-static", "0.3", "--max-total-tokens", "8192", "--page-size", "16"),
    *("--max-running-requests", "8", "--chunked-prefill-size", "256", "--grammar-backend", "none"),
    *("--disable-overlap-schedule", "--skip-server-warmup", "--log-level", "info", "--enable-metrics"),
]


def python_path(before: str) -> str:
    """PYTHONPATH with the stand-ins for what has no wheel for CPUs; ``before``: what it was."""
    return os.pathsep.join(filter(None, (str(STUBS), before)))


def server(python: str, model: str, port: int, *flags: str, role: str = "", bootstrap: int = 0) -> list[str]:
    """The command of a server. ``role``: prefill, decode, or nothing for one that does both."""
    command = [python, "-m", "sglang.launch_server", "--model-path", model, *FLAGS, "--port", str(port), *flags]
    if role:
        command += ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "kvxfer"]
        command += ["--disaggregation-bootstrap-port", str(bootstrap)]
    if role == "decode":
        command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
    return command


def router(python: str, port: int, metrics_port: int, prefill: str, bootstrap: int, decode: str) -> list[str]:
    """The command of SGLang's own router, before servers at the URLs ``prefill`` and ``decode``. It would serve its
    metrics to every network, and try a request again that failed."""
    return [
        *(python, "-m", "sglang_router.launch_router", "--pd-disaggregation", "--disable-retries"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics_port)),
        *("--prefill", prefill, str(bootstrap), "--decode", decode),
    ]


def make_tiny_llama(path: pathlib.Path) -> pathlib.Path:
    """Random weights whose argmax is not always the same token, and a tokenizer of bytes."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
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
