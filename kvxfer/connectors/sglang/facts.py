"""What an engine of SGLang is set to, as facts: every server argument that is not exempt (:mod:`.exempt`), the model's
config, and the files that turn a text into tokens. Decides how a value is written that names a file; must never know
SGLang's classes: its objects are read by attribute.
"""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import re
from typing import Any

from kvxfer.connectors.common import facts
from kvxfer.connectors.common.checkpoint import BOOKKEEPING, ModelName, NotKnown, directory_of
from kvxfer.connectors.common.facts import Exemptions
from kvxfer.connectors.common.file_digests import XXH3, FileChanged, digests_of, shared_cache, stamps_of
from kvxfer.connectors.sglang.exempt import EXEMPT
from kvxfer.errors import ConfigError

CONFIG = "config"
"""Before the names of the model's config."""
CONFIG_EXEMPT = Exemptions({f"{CONFIG}.{name}": "a path, a version, or compared by itself" for name in BOOKKEEPING})
RESOLVED = {"dtype": "dtype", "quantization": "quantization", "context_length": "context_len"}
"""Arguments whose meaning depends on the model, and the attribute of SGLang's ModelConfig that has it."""
TOKENIZER = re.compile(
    r"(tokenizer|vocab|added_tokens|special_tokens|merges|chat_template|tekken|preprocessor|processor|video_processor)"
    r"[^/]*\.(json|jsonl|txt|model|jinja|py)|[^/]*\.tiktoken"
)
"""Names of the files by which texts, and images, become what a model computes with."""
FILES_MAX = 4096
"""Files of one directory that an argument names."""


def facts_of(arguments: Any, model: Any) -> dict[str, str]:
    """``arguments``: an object with all of SGLang's server arguments as they are resolved; ``model``: its ModelConfig.
    Raises ConfigError, naming the argument, for a value that cannot be compared, and for a file that cannot be read."""
    values = dict(vars(arguments))
    values |= {name: getattr(model, there) for name, there in RESOLVED.items() if hasattr(model, there)}
    tokenizer = values.pop("tokenizer_path", None) or values.get("model_path") or ""
    found = facts.facts_of(values, EXEMPT)
    found = {name: _by_content(name, text) for name, text in found.items()}
    found["tokenizer_path"] = _tokenizer(str(tokenizer), values)
    return found | facts.facts_of(model.hf_config.to_dict(), CONFIG_EXEMPT, CONFIG)


def _by_content(name: str, text: str) -> str:
    """The fact, or, where it names a file or a directory on this host, a digest of what is in there. One list of paths
    is looked at too."""
    try:
        values = json.loads(text)
    except ValueError:
        values = text
    if isinstance(values, list) and any(isinstance(value, str) and _is_place(value) for value in values):
        return json.dumps([_digest(name, value) if isinstance(value, str) else value for value in values])
    return _digest(name, text)


def _is_place(text: str) -> bool:
    """A single word may be the name of something here by chance."""
    try:
        return ("." in text and os.path.isfile(text)) or (os.sep in text and os.path.exists(text))
    except ValueError:  # a null byte
        return False


def _digest(name: str, text: str) -> str:
    if not _is_place(text):
        return text
    place = pathlib.Path(text)
    return _content(name, [place] if place.is_file() else [path for path in place.rglob("*") if path.is_file()], place)


def _content(name: str, paths: list[pathlib.Path], place: pathlib.Path) -> str:
    if len(paths) > FILES_MAX:
        raise ConfigError(f"{name}: {place} has more than FILES_MAX={FILES_MAX} files, so engines cannot compare it")
    try:
        stamps = stamps_of(sorted(str(path.absolute()) for path in paths))
        digests = digests_of(stamps, XXH3, shared_cache())
    except (OSError, FileChanged) as error:
        raise ConfigError(f"{name}: {place} cannot be compared with other engines: {error}") from None
    if place.is_file():
        return f"content {digests[str(place.absolute())]}"
    names = {str(path.relative_to(place)): digests[str(path.absolute())] for path in paths}
    return f"content {hashlib.sha256(json.dumps(names, sort_keys=True).encode()).hexdigest()[:32]}"


def _tokenizer(text: str, values: dict[str, Any]) -> str:
    if not text:
        return ""
    try:
        place = directory_of(ModelName(text, str(values.get("revision") or ""), values.get("download_dir")))
    except NotKnown:  # nor would its weights be, if it is the model's own
        return "not on this host" if text == values.get("model_path") else text
    paths = [path for path in place.iterdir() if TOKENIZER.fullmatch(path.name) and path.is_file()]
    return _content("tokenizer_path", paths, place) if paths else "no files"
