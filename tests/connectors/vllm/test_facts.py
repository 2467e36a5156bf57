"""Which of vLLM's settings count: all but those that are exempt. ``fields`` has every field of the configuration of a
version of vLLM, and every variable that it reads (tests/support/vllm/config_fields.py prints them); in nightly the
installed version is asked for its own.
"""

from __future__ import annotations

import pathlib

import pytest

from kvxfer.connectors.vllm import facts as vllm_facts
from kvxfer.connectors.vllm.exempt_variables import SECRET, VARIABLES
from kvxfer.connectors.vllm.exemptions import CONFIG
from kvxfer.connectors.vllm.facts import variable_facts

FIELDS = pathlib.Path(__file__).with_name("fields")
VERSIONS = sorted(path.stem for path in FIELDS.iterdir())


def recorded(version: str) -> dict[str, str]:
    """By name: whether it counts or is exempt."""
    lines = (FIELDS / f"{version}.txt").read_text().splitlines()
    return {name: kind for kind, _, name in (line.partition(" ") for line in lines)}


def is_exempt(name: str) -> bool:
    variable = name.removeprefix("env.")
    if variable != name:
        return SECRET.search(variable) is not None or VARIABLES.why(variable) is not None
    return CONFIG.why(name) is not None


@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_of_a_version_counts_or_is_exempt_as_it_is_written_down(version: str) -> None:
    fields = recorded(version)
    assert len(fields) > 500
    assert {name: "exempt" if is_exempt(name) else "counts" for name in fields} == fields


def test_every_exemption_is_of_a_field_that_some_version_has_and_has_a_reason() -> None:
    names = {name for version in VERSIONS for name in recorded(version)}
    reasons = CONFIG.reasons | {f"env.{name}": reason for name, reason in VARIABLES.reasons.items()}
    parts = {name.removesuffix(".*") for name in reasons if name.endswith(".*")}
    unknown = {name for name in reasons if name not in names and name.removesuffix(".*") not in names}
    unknown -= {f"{part}.*" for part in parts if any(name.startswith(f"{part}.") for name in names)}
    assert unknown == set()
    assert all(len(reason) > 15 for reason in reasons.values())


def test_a_field_that_nobody_has_thought_of_counts() -> None:
    parts = {name.rpartition(".")[0] for version in VERSIONS for name in recorded(version) if "." in name}
    whole = {name.removesuffix(".*") for name in CONFIG.reasons if name.endswith(".*")}
    counted = {part for part in parts if part != "env" and not any(f"{part}.".startswith(f"{one}.") for one in whole)}
    assert {"model_config", "cache_config", "parallel_config", "scheduler_config", "attention_config"} <= counted
    assert {"compilation_config", "lora_config", "speculative_config", "load_config", "mamba_config"} <= counted
    assert not any(is_exempt(f"{part}.scale_of_kv") for part in counted)
    assert not is_exempt("scale_of_kv")


def test_a_variable_counts_where_it_is_set_unless_it_may_be_a_secret() -> None:
    names = ("VLLM_NEW_KV", "VLLM_PORT", "VLLM_NEW_API_KEY", "VLLM_UNSET", "VLLM_EMPTY")
    environment = {"VLLM_NEW_KV": "1", "VLLM_PORT": "8000", "VLLM_NEW_API_KEY": "s3cret", "VLLM_EMPTY": "", "HOME": "/"}
    assert variable_facts(environment, names) == {"env.VLLM_NEW_KV": "1"}


def test_files_that_differ_behind_the_bound_are_not_the_same(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_facts, "FILE_BYTES_MAX", 8)
    one, same, other, long, longer = (tmp_path / name for name in ("one", "same", "other", "long", "longer"))
    for path, text in (
        (one, "a" * 8),
        (same, "a" * 8),
        (other, "a" * 7),
        (long, "a" * 8 + "1"),
        (longer, "a" * 8 + "2"),
    ):
        path.write_text(text)
    digest = vllm_facts._digest_of
    assert digest(one) == digest(same) != digest(other)
    assert len({digest(one), digest(long), digest(longer), digest(long)}) == 4, "unknown equals nothing, nor itself"
