"""Every server argument of SGLang counts, unless there is a reason why it cannot change KV; what differs is named."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from types import SimpleNamespace
from typing import Any

import pytest

from kvxfer.connectors.sglang.exempt import EXEMPT
from kvxfer.connectors.sglang.facts import FILES_MAX, facts_of
from kvxfer.connectors.sglang.limits import Identity, Layout, check_peer
from kvxfer.connectors.sglang.record import make_record
from kvxfer.errors import ConfigError, IncompatibleError
from tests.support.sglang.arguments import ARGUMENTS

USUAL: dict[str, tuple[Any, Any]] = {
    "host": ("10.0.0.1", "10.0.0.2"),
    "port": (8100, 8200),
    "disaggregation_mode": ("prefill", "decode"),
    "disaggregation_bootstrap_port": (8998, 9000),
    "mem_fraction_static": (0.8, 0.6),
    "max_running_requests": (64, 512),
    "chunked_prefill_size": (8192, -1),
    "disable_radix_cache": (False, True),
    "disable_cuda_graph": (True, False),
    "cuda_graph_config": (object(), object()),
    "log_level": ("info", "warning"),
    "tp_size": (4, 8),
    "page_size": (16, 64),
    "deepep_mode": ("normal", "low_latency"),
    "random_seed": (1, 2),
    "enable_metrics": (True, False),
}
"""What differs between a prefill and a decode engine of one model."""


def arguments(**changes: Any) -> SimpleNamespace:
    return SimpleNamespace(**(dict.fromkeys(ARGUMENTS) | {"model_path": "m"} | changes))


def engine(config: dict[str, Any] | None = None, **changes: Any) -> Identity:
    """What an engine with these settings says that it is."""
    given = config or {"hidden_size": 64, "rope_scaling": {"factor": 2.0}}
    hf = SimpleNamespace(architectures=["Llama"], to_dict=lambda: given)
    model = SimpleNamespace(hf_config=hf, head_dim=16, get_total_num_kv_heads=lambda: 2)
    pages = SimpleNamespace(
        kv_cache_dtype_str="bf16",
        kv_data_ptrs=[1, 2],
        kv_item_lens=[512, 512],
        page_size=16,
        engine_rank=0,
        kv_layout=None,
    )
    record = make_record(arguments(**changes), model, pages, is_mla=False, tp_size=1, shape=None)
    return Identity(dataclasses.replace(record, weights_fingerprint="0" * 32), Layout((512, 512), (64,)))


def refusal(one: Identity, other: Identity) -> str:
    """Why they do not match; nothing if they do."""
    try:
        check_peer(one, other)
    except IncompatibleError as error:
        return str(error)
    return ""


def test_each_argument_is_compared_or_exempt() -> None:
    """One argument after the other differs between two engines."""
    default = engine()
    for name in ARGUMENTS:
        changed = engine(**{name: "another"})
        said = refusal(default, changed)
        if name == "attention_backend":  # a field of the record
            assert "attention_backend is 'None' here and 'another' there" in said
        elif EXEMPT.why(name) is None:
            before = "not on this host" if name == "tokenizer_path" else "not set"
            assert f"{name} is '{before}' here and 'another' there" in said, name
        else:
            assert said == "", f"{name}: {EXEMPT.why(name)}"


def test_each_exemption_is_of_an_argument_and_has_a_reason() -> None:
    assert set(EXEMPT.reasons) <= set(ARGUMENTS)
    assert all(len(reason.split()) >= 3 for reason in EXEMPT.reasons.values())


def test_an_argument_that_nobody_thought_of_counts() -> None:
    said = refusal(engine(a_new_argument=1.5), engine(a_new_argument=2.5))
    assert said == "the engines do not match: a_new_argument is '1.5' here and '2.5' there"
    assert refusal(engine(), engine(a_new_argument=False)) == "", "off is what it was before there was one"


def test_a_usual_prefill_and_decode_engine_match() -> None:
    both = [engine(**{name: values[role] for name, values in USUAL.items()}) for role in (0, 1)]
    check_peer(*both)
    assert all(len(identity.record.facts) < 4096 for identity in both)


def test_the_models_config_is_named_by_its_settings() -> None:
    said = refusal(
        engine({"rope_scaling": {"factor": 2.0}}), engine({"rope_scaling": {"factor": 4.0}, "_name_or_path": "b"})
    )
    assert said == "the engines do not match: config.rope_scaling.factor is '2.0' here and '4.0' there"


def test_what_depends_on_the_model_is_compared_as_it_is_resolved() -> None:
    model = SimpleNamespace(hf_config=SimpleNamespace(to_dict=dict), dtype="torch.bfloat16", context_len=4096)
    assert facts_of(arguments(dtype="auto"), model) == facts_of(arguments(dtype="bfloat16", context_length=4096), model)


@pytest.mark.parametrize("name", ["quantization_param_path", "chat_template", "an_argument_of_a_later_version"])
def test_a_file_counts_by_its_content(tmp_path: pathlib.Path, name: str) -> None:
    paths = [tmp_path / one for one in ("a.json", "b.json", "c.json")]
    for path, scale in zip(paths, (1.0, 1.0, 2.0), strict=True):
        path.write_text(json.dumps({"scale": scale}))
    one, same, other = (engine(**{name: str(path)}) for path in paths)
    check_peer(one, same)
    assert f"{name} is 'content " in refusal(one, other)
    assert str(tmp_path) not in one.record.facts
    assert name in refusal(one, engine(**{name: str(tmp_path / "lost.json")}))


def test_a_directory_counts_by_its_content(tmp_path: pathlib.Path) -> None:
    for name, text in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name / "deep").mkdir(parents=True)
        (tmp_path / name / "deep" / "experts.bin").write_text(text)
    one, same, other = (engine(kt_weight_path=str(tmp_path / name)) for name in "abc")
    check_peer(one, same)
    assert "kt_weight_path is 'content " in refusal(one, other)
    for number in range(FILES_MAX + 1):
        (tmp_path / "c" / str(number)).touch()
    with pytest.raises(ConfigError, match=r"kt_weight_path: .* FILES_MAX"):
        engine(kt_weight_path=str(tmp_path / "c"))


def test_files_that_make_tokens_of_texts_count_by_their_content(tmp_path: pathlib.Path) -> None:
    for name, template in (("a", "x"), ("b", "x"), ("c", "y")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        (tmp_path / name / "model.safetensors").write_text(name)
        (tmp_path / name / "README.md").write_text(name)
    one, same, other = (engine(model_path=str(tmp_path / name)) for name in "abc")
    check_peer(one, same)
    check_peer(one, engine(model_path="elsewhere", tokenizer_path=str(tmp_path / "b")))
    assert "tokenizer_path is 'content " in refusal(one, other)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "scales.json").write_text("{}")

    def fail(*_: Any) -> None:
        raise PermissionError("not yours")

    monkeypatch.setattr("kvxfer.connectors.sglang.facts.digests_of", fail)
    with pytest.raises(ConfigError, match=r"quantization_param_path: .*scales\.json cannot be compared .*not yours"):
        engine(quantization_param_path=str(tmp_path / "scales.json"))
