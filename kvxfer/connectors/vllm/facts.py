"""What an engine of vLLM says of its KV: every setting of its configuration, of its model's config and every variable
of vLLM's that is set, but for those that are exempt (:mod:`.exemptions`, :mod:`.exempt_variables`).

Decides how vLLM's objects become named settings. Reads them by attribute; imports of vLLM only the list of its
environment variables.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Collection, Mapping
from typing import Any

from kvxfer.connectors.common.checkpoint import BOOKKEEPING, ModelName, NotKnown, directory_of, unknown
from kvxfer.connectors.common.facts import Exemptions, facts_of
from kvxfer.connectors.vllm.exempt_variables import SECRET, VARIABLES
from kvxfer.connectors.vllm.exemptions import CONFIG, DRAFT

LENGTH_ROPES = frozenset({"longrope", "su"})
"""Kinds of rotary embeddings with factors for short and for long contexts: vLLM takes the long ones for every prompt
where ``max_model_len`` is above the context that the model was trained with first."""
DRAFTLESS = frozenset({"ngram", "[ngram]", "ngram_gpu", "suffix"})
"""Ways to decode speculatively without a draft model: drafts are found in the text, and no layer of one is in the
cache."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""What makes of an image, or the like, what a model sees; beside its weights."""
SCALES = "model_config.multimodal_config.mm_encoder_fp8_scale_path"
"""A setting that names a file: what is in it counts, not where it lies."""
FILE_BYTES_MAX = 1 << 24
NONE_EXEMPT = Exemptions({})


def engine_facts(vllm_config: Any, variables: Collection[str] | None = None) -> dict[str, str]:
    """The facts of an engine: name -> text. ``variables``: the names that vLLM reads of the environment; ``None``: ask
    it. Raises ConfigError, naming it, for a setting that cannot be compared."""
    speculative = getattr(vllm_config, "speculative_config", None)
    is_drafted = speculative is not None and str(getattr(speculative, "method", None)) not in DRAFTLESS
    settings = _members(vllm_config)
    if not is_drafted:
        settings.pop("speculative_config", None)
    more = settings.get("additional_config")
    if more is not None and hasattr(more, "compute_hash"):  # a platform's own object, which says itself what it is
        settings["additional_config"] = str(more.compute_hash())
    facts = facts_of(settings, CONFIG)
    model = vllm_config.model_config
    facts |= _model_facts(model, "")
    drafted = getattr(speculative, "draft_model_config", None)
    if is_drafted and drafted is not None:
        facts |= facts_of({"draft": drafted}, DRAFT) | _model_facts(drafted, "draft.")
    if getattr(model, "multimodal_config", None) is not None:
        facts |= _processor_facts(model)
    if SCALES in facts:
        facts[SCALES] = _digest_of(pathlib.Path(facts[SCALES]))
    return facts | variable_facts(os.environ, _known_variables() if variables is None else variables)


def variable_facts(environment: Mapping[str, str], known: Collection[str]) -> dict[str, str]:
    """Those of vLLM's ``known`` variables that are set, and not exempt."""
    told = {name: environment[name] for name in known if name in environment and not SECRET.search(name)}
    return {f"env.{name}": text for name, text in told.items() if text and VARIABLES.why(name) is None}


def _model_facts(model: Any, prefix: str) -> dict[str, str]:
    """What the config of a model's files says, with what was put over it."""
    facts = facts_of({f"{prefix}hf_config": model.hf_config.to_dict()}, NONE_EXEMPT)
    facts = {name: text for name, text in facts.items() if name.rpartition(".")[2] not in BOOKKEEPING}
    if _ropes_by_length(model.hf_config.to_dict()):
        facts[f"{prefix}max_model_len"] = str(model.max_model_len)
    return facts


def _members(config: Any) -> dict[str, Any]:
    """The settings of a config object, by name: its fields, where it is a dataclass."""
    names = getattr(type(config), "__dataclass_fields__", None) or vars(config)
    return {name: getattr(config, name) for name in names if hasattr(config, name)}


def _known_variables() -> Collection[str]:
    from vllm import envs

    return list(envs.environment_variables)


def _ropes_by_length(value: Any) -> bool:
    """Whether a config, or one within it, has rotary embeddings that vLLM chooses by the longest context it is to
    serve."""
    if isinstance(value, dict):
        kind = value.get("rope_type", value.get("type"))
        return (isinstance(kind, str) and kind in LENGTH_ROPES) or any(map(_ropes_by_length, value.values()))
    return isinstance(value, list) and any(map(_ropes_by_length, value))


def _processor_facts(model: Any) -> dict[str, str]:
    """Digests of the files; of one that cannot be read, a text that equals nothing."""
    try:
        directory = directory_of(ModelName(str(model.model), str(model.revision or "")))
    except (NotKnown, OSError) as error:
        return {"processor": unknown(str(error))}
    found = {name: directory / name for name in PROCESSOR_FILES}
    return {f"processor.{name}": _digest_of(path) for name, path in found.items() if path.exists()}


def _digest_of(path: pathlib.Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        return unknown(str(error))
    if len(content) > FILE_BYTES_MAX:
        return unknown(f"{path} has more than FILE_BYTES_MAX={FILE_BYTES_MAX} bytes")
    return hashlib.sha256(content).hexdigest()
