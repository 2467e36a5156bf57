"""What all sources of models share: whether the engine can run what a directory describes, how progress is reported,
and how a failed write is raised. Decides which architectures are accepted; must never know where a model comes from.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvxfer.errors import ConfigError

ARCHITECTURE = "LlamaForCausalLM"
LENGTH_BOUND_ROPES = ("dynamic", "longrope")

Progress = Callable[[str, int, int], None]
"""Called with (stage, bytes done, bytes in total), from any thread.

The stages are ``wait`` (for another process), ``download``, ``unpack``, ``convert`` and ``write``.
"""


def check_config(path: Path) -> dict[str, Any]:
    """The content of ``path/config.json``. Raises ConfigError unless the engine can run and move what it describes."""
    file = path / "config.json"
    try:
        config = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} has no config.json, so it is not a Hugging Face model directory") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{file} is not a JSON object")
    found = config.get("architectures") or [config.get("model_type", "nothing")]
    if ARCHITECTURE not in found:
        raise ConfigError(f"{path} holds a {', '.join(map(str, found))}; the built-in engine runs {ARCHITECTURE} only")
    for key in ("rope_parameters", "rope_scaling"):
        rope = config.get(key) or {}
        kind = rope.get("rope_type", rope.get("type"))
        if kind in LENGTH_BOUND_ROPES:
            raise ConfigError(
                f"{path} uses {kind} RoPE, where a token's KV depends on the prompt's length: "
                "it can be neither cached nor moved"
            )
    return config


@contextlib.contextmanager
def storing() -> Iterator[None]:
    """Write files within the block: safetensors reports a failed write as an error of its own, which leaves as the
    OSError that it was.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        found = re.search(r"os error (\d+)", str(error))
        number = int(found[1]) if found else errno.ENOSPC if "No space left" in str(error) else errno.EIO
        raise OSError(number, os.strerror(number) if found else str(error)) from error
