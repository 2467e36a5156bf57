"""Where models come from: a name becomes a local Hugging Face directory.

Decides what is fetched, what is checked and what counts as complete. It must never load a model for inference, draw a
progress bar or know the caller. A built model appears in the cache by one rename, after everything in it was synced;
two processes that want the same one take turns; a second call reads one small file. torch is loaded only to build.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvxfer import places
from kvxfer.engine.model_files import Progress, check_config
from kvxfer.errors import ConfigError

INSTEAD = "XDG_CACHE_HOME or HOME"
"""What names another place for models, where the default one is no good."""
DEFAULT_MODEL = "smollm2-135m-instruct"
TINY_MODEL = "tiny"
MARKER = "kvxfer.json"


def default_cache_dir() -> Path:
    """``$XDG_CACHE_HOME/kvxfer`` or ``~/.cache/kvxfer``. Raises ConfigError where this user has neither."""
    return places.base_dir("XDG_CACHE_HOME", ".cache", what="models", instead=INSTEAD) / "kvxfer"


def resolve(model: str = DEFAULT_MODEL, *, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Return a local directory with config, weights and tokenizer of ``model``, fetching or building it if needed.

    ``model``: ``smollm2-135m-instruct``, ``tiny`` (random words, no download), a local directory, or a hub id
    ``owner/name``. ``cache_dir`` stands for ``$XDG_CACHE_HOME/kvxfer``. Raises ConfigError, in one sentence, for
    anything that cannot be had; then nothing half-written is left.
    """
    report = progress or (lambda stage, done, total: None)
    if model == DEFAULT_MODEL:
        from kvxfer.engine import smollm2

        return _built(model, smollm2.SOURCE, smollm2.SPACE_BYTES, smollm2.build, cache_dir, report)
    if model == TINY_MODEL:
        from kvxfer.engine import tiny

        return _built(model, tiny.SOURCE, tiny.SPACE_BYTES, tiny.build, cache_dir, report)
    path = places.expand(model)
    if path.is_dir():
        check_config(path)
        return path.resolve()
    if model.count("/") == 1 and not model.startswith(("/", ".", "~")) and all(model.split("/")):
        from kvxfer.engine import hub

        return hub.snapshot(model)
    raise ConfigError(
        f"model {model!r} is neither {DEFAULT_MODEL!r} nor {TINY_MODEL!r} nor an existing directory "
        "nor a hub id like owner/name"
    )


def _built(
    model: str,
    source: str,
    space_bytes: int,
    build: Callable[[Path, Path, Progress], None],
    cache_dir: Path | None,
    report: Progress,
) -> Path:
    """The directory of ``model`` in the cache, made by ``build(target, scratch, report)`` unless it is complete."""
    models = (cache_dir or default_cache_dir()) / "models"
    target = models / model
    if _is_complete(target, source):
        return target
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _exclusive(models / f".{model}.lock", report):
            if _is_complete(target, source):
                return target
            for stale in models.glob(f".{model}.tmp-*"):
                shutil.rmtree(stale, ignore_errors=True)
            free = shutil.disk_usage(models).free
            if free < space_bytes:
                raise ConfigError(
                    f"building {model} in {models} needs {space_bytes >> 20} MiB of free disk, "
                    f"{free >> 20} MiB are there"
                )
            with tempfile.TemporaryDirectory(prefix=f".{model}.tmp-", dir=models) as scratch:
                made = Path(scratch) / "model"
                made.mkdir()
                build(made, Path(scratch), report)
                _seal(made, source)
                if target.exists():
                    target.rename(Path(scratch) / "outdated")
                made.rename(target)
                _sync(models)
    except OSError as error:
        hint = f"; {INSTEAD} names another place" if error.errno in places.NOT_WRITABLE else ""
        raise ConfigError(storage_failure(f"building {model} in {models}", error) + hint) from error
    return target


def storage_failure(what: str, error: OSError) -> str:
    """One sentence for a failed file operation."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{what} failed: the disk is full"
    return f"{what} failed: {error.strerror or error}"


def _is_complete(target: Path, source: str) -> bool:
    try:
        marker = json.loads((target / MARKER).read_text("utf-8"))
        return bool(
            marker["source"] == source
            and all((target / name).stat().st_size == size for name, size in marker["files"].items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _seal(made: Path, source: str) -> None:
    """Sync every file and write the marker that says what a complete directory holds."""
    files = {file.name: file.stat().st_size for file in sorted(made.iterdir())}
    (made / MARKER).write_text(json.dumps({"source": source, "files": files}, indent=1) + "\n", "utf-8")
    for file in made.iterdir():
        _sync(file)
    _sync(made)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _exclusive(lock: Path, report: Progress) -> Iterator[None]:
    """Hold ``lock`` against other processes; the kernel gives it back if this one dies."""
    with lock.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                report("wait", 0, 0)
                time.sleep(0.2)
        yield
