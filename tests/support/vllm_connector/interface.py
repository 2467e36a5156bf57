"""What the connector relies on in vLLM, read out of a version's source: base classes, signatures, attributes that are
read by name, and where vLLM calls the connector. Nothing is installed or imported: the source is parsed.

usage: python -m tests.support.vllm_connector.interface WHEEL|DIRECTORY [--write]

Prints one line a fact; ``--write`` makes them the manifest. A version is supported as far as its facts are those of the
manifest: a line that is new, gone or other is to be looked at by a person before the manifest is written anew.
"""

from __future__ import annotations

import argparse
import ast
import pathlib
import sys
import zipfile
from collections.abc import Iterator, Mapping
from typing import Protocol

MANIFEST = pathlib.Path(__file__).with_name("interface.txt")
CONNECTOR = "distributed/kv_transfer/kv_connector"
BASE = f"{CONNECTOR}/v1/base.py"

WHOLE = {
    BASE: (
        "KVConnectorBase_V1",
        "SupportsHMA",
        "KVConnectorMetadata",
        "KVConnectorHandshakeMetadata",
        "KVConnectorWorkerMetadata",
        "KVConnectorTransferResults",
        "KVConnectorRole",
    ),
    f"{CONNECTOR}/factory.py": ("KVConnectorFactory",),
    f"{CONNECTOR}/v1/metrics.py": ("KVConnectorStats", "KVConnectorPromMetrics"),
    "v1/kv_cache_interface.py": ("KVCacheGroupSpec", "KVCacheConfig"),
    "v1/kv_cache_layout.py": ("KVCacheLayout",),
}
"""Classes of which every method, field and member is a fact: a new one may ask something of a connector."""

FUNCTIONS = {
    f"{CONNECTOR}/utils.py": ("get_current_attn_backends",),
    "v1/attention/backends/cpu_attn.py": ("_get_attn_isa",),
    "v1/metrics/utils.py": ("create_metric_per_engine",),
    "distributed/parallel_state.py": (
        "get_pp_group",
        "get_tensor_model_parallel_rank",
        "get_tensor_model_parallel_world_size",
    ),
    "distributed/utils.py": ("get_pp_indices",),
    "tracing/__init__.py": ("extract_trace_context", "instrument_manual"),
    "tracing/otel.py": ("extract_trace_context", "instrument_manual"),
    "tracing/utils.py": ("extract_trace_context", "instrument_manual"),
}
"""Functions that the connector calls, wherever of these they are."""

ATTRIBUTES = {
    ("config/vllm.py", "VllmConfig"): (
        "model_config",
        "cache_config",
        "parallel_config",
        "kv_transfer_config",
        "observability_config",
        "aux_output_config",
    ),
    ("config/kv_transfer.py", "KVTransferConfig"): (
        "kv_role",
        "engine_id",
        "kv_connector_extra_config",
        "kv_load_failure_policy",
    ),
    ("config/aux_output.py", "AuxOutputConfig"): ("enabled",),
    ("config/observability.py", "ObservabilityConfig"): ("otlp_traces_endpoint",),
    ("config/cache.py", "CacheConfig"): ("block_size", "cache_dtype", "get_resolved_kv_cache_layout"),
    ("config/parallel.py", "ParallelConfig"): (
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "prefill_context_parallel_size",
        "decode_context_parallel_size",
        "data_parallel_hybrid_lb",
    ),
    ("config/model.py", "ModelConfig"): (
        "model",
        "revision",
        "seed",
        "dtype",
        "served_model_name",
        "enable_sleep_mode",
        "architectures",
        "hf_config",
        "get_num_kv_heads",
        "get_total_num_kv_heads",
        "get_total_num_hidden_layers",
        "use_mla",
        "get_head_size",
    ),
    ("v1/core/sched/output.py", "SchedulerOutput"): (
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
    ),
    ("v1/core/sched/output.py", "NewRequestData"): ("req_id", "block_ids", "num_computed_tokens"),
    ("v1/core/sched/output.py", "CachedRequestData"): (
        "req_ids",
        "resumed_req_ids",
        "new_block_ids",
        "num_computed_tokens",
    ),
    ("v1/core/kv_cache_manager.py", "KVCacheBlocks"): ("get_block_ids",),
    ("v1/request.py", "Request"): (
        "request_id",
        "status",
        "kv_transfer_params",
        "num_prompt_tokens",
        "prompt_token_ids",
        "prompt_embeds",
        "lora_request",
        "mm_features",
        "trace_headers",
        "skip_reading_prefix_cache",
    ),
    ("v1/request.py", "RequestStatus"): (
        *("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED", "PREEMPTED", "WAITING", "WAITING_FOR_REMOTE_KVS"),
    ),
    ("lora/request.py", "LoRARequest"): ("lora_path",),
    ("multimodal/inputs.py", "MultiModalFeatureSpec"): ("modality", "identifier", "mm_position"),
    ("multimodal/inputs.py", "PlaceholderRange"): ("offset",),
    (f"{CONNECTOR}/v1/metrics.py", "KVConnectorPromMetrics"): (
        "_counter_cls",
        "_gauge_cls",
        "_histogram_cls",
        "_labelnames",
    ),
    ("v1/outputs.py", "KVConnectorOutput"): ("finished_recving", "finished_sending", "kv_connector_worker_meta"),
}
"""What is read by name, by the class that has it."""

CALLERS = (
    "v1/core/sched/scheduler.py",
    "v1/engine/core.py",
    "v1/worker/gpu_model_runner.py",
    "v1/worker/gpu_worker.py",
    "v1/worker/kv_connector_model_runner_mixin.py",
    "v1/worker/gpu/kv_connector.py",
    "model_executor/layers/attention/kv_transfer_utils.py",
    "config/vllm.py",
)
"""Where vLLM calls a connector."""
RECEIVERS = ("connector", "kv_connector", "connector_cls", "get_kv_transfer_group()", "kv_transfer_group")
SPECS = "v1/kv_cache_interface.py"
"""Whose classes say which kinds of KV cache there are: some of them cannot be moved."""
PLUGINS = ("plugins/__init__.py", "vllm.general_plugins")


class Tree(Protocol):
    """The source of one version of vLLM."""

    def read(self, path: str) -> str | None:
        """The text of a file under ``vllm/``; ``None`` where there is none."""
        ...


class WheelTree:
    """Of a wheel, which is not unpacked."""

    def __init__(self, path: pathlib.Path) -> None:
        self._archive = zipfile.ZipFile(path)
        self._names = frozenset(self._archive.namelist())

    def read(self, path: str) -> str | None:
        name = f"vllm/{path}"
        return self._archive.read(name).decode() if name in self._names else None


class DirectoryTree:
    """Of a directory that holds ``vllm``, such as site-packages."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path / "vllm"

    def read(self, path: str) -> str | None:
        file = self._path / path
        return file.read_text() if file.is_file() else None


def open_tree(path: pathlib.Path) -> Tree:
    return DirectoryTree(path) if path.is_dir() else WheelTree(path)


def facts_of(tree: Tree) -> dict[str, str]:
    """Each fact's value by its name."""
    facts: dict[str, str] = {}
    for path, names in WHOLE.items():
        for name in names:
            facts.update(_members(_find(tree, path, name), name))
    for name in sorted({name for names in FUNCTIONS.values() for name in names}):
        found = [_find(tree, path, name) for path, names in FUNCTIONS.items() if name in names]
        functions = [node for node in found if isinstance(node, ast.FunctionDef)]
        facts[name] = _signature(functions[0]) if functions else "MISSING"
    for (path, name), attributes in ATTRIBUTES.items():
        known = _attributes(_find(tree, path, name))
        facts.update({f"{name}.{attribute}": "there" if attribute in known else "MISSING" for attribute in attributes})
    for path in CALLERS:
        facts.update(_calls(tree, path))
    kinds = [node.name for node in ast.walk(ast.parse(tree.read(SPECS) or "")) if isinstance(node, ast.ClassDef)]
    facts.update({f"kind of KV cache {kind}": "there" for kind in kinds if kind.endswith(("Spec", "Specs"))})
    path, group = PLUGINS
    facts["entry points"] = group if group in (tree.read(path) or "") else "MISSING"
    return facts


def lines_of(facts: Mapping[str, str]) -> list[str]:
    return sorted(f"{name}: {value}" for name, value in facts.items())


def differences(facts: Mapping[str, str], manifest: str) -> list[str]:
    """What the manifest has and the version has not (``-``), and the other way round (``+``)."""
    now, wanted = set(lines_of(facts)), {line for line in manifest.splitlines() if line and not line.startswith("#")}
    return [*(f"- {line}" for line in sorted(wanted - now)), *(f"+ {line}" for line in sorted(now - wanted))]


def _find(tree: Tree, path: str, name: str) -> ast.stmt | None:
    text = tree.read(path)
    nodes = ast.walk(ast.parse(text)) if text is not None else iter(())
    kinds = (ast.ClassDef, ast.FunctionDef)
    return next((node for node in nodes if isinstance(node, kinds) and node.name == name), None)


def _members(node: ast.stmt | None, name: str) -> dict[str, str]:
    if not isinstance(node, ast.ClassDef):
        return {name: "MISSING"}
    facts = {name: f"class({', '.join(ast.unparse(base) for base in node.bases)})"}
    for child in node.body:
        if isinstance(child, ast.FunctionDef):
            marks = [ast.unparse(mark) for mark in child.decorator_list]
            facts[f"{name}.{child.name}"] = " ".join([*(f"@{mark}" for mark in marks), _signature(child)])
        elif isinstance(child, ast.AnnAssign):
            facts[f"{name}.{ast.unparse(child.target)}"] = ast.unparse(child.annotation)
        elif isinstance(child, ast.Assign):
            facts[f"{name}.{ast.unparse(child.targets[0])}"] = "there"
    return facts


def _signature(node: ast.FunctionDef) -> str:
    """Without annotations: a caller cannot see them."""
    arguments = ast.parse("lambda: 0", mode="eval").body
    assert isinstance(arguments, ast.Lambda)
    given = node.args

    def bare(names: list[ast.arg]) -> list[ast.arg]:
        return [ast.arg(argument.arg) for argument in names]

    arguments.args = ast.arguments(
        posonlyargs=bare(given.posonlyargs),
        args=bare(given.args),
        vararg=given.vararg and ast.arg(given.vararg.arg),
        kwonlyargs=bare(given.kwonlyargs),
        kw_defaults=given.kw_defaults,
        kwarg=given.kwarg and ast.arg(given.kwarg.arg),
        defaults=given.defaults,
    )
    return f"({ast.unparse(arguments.args)})"


def _attributes(node: ast.stmt | None) -> set[str]:
    """Fields, members, properties, methods, and what ``__init__`` or another method sets."""
    found: set[str] = set()
    if not isinstance(node, ast.ClassDef):
        return found
    for child in ast.walk(node):
        if isinstance(child, ast.FunctionDef):
            found.add(child.name)
        elif isinstance(child, (ast.AnnAssign, ast.Assign)):
            targets = child.targets if isinstance(child, ast.Assign) else [child.target]
            found.update(ast.unparse(target).removeprefix("self.") for target in targets)
    return found


def _calls(tree: Tree, path: str) -> dict[str, str]:
    """By file, function and method: how a connector is called there, in the order of the source."""
    text = tree.read(path)
    if text is None:
        return {path: "MISSING"}
    found: dict[str, list[str]] = {}
    for function, call in _walk(ast.parse(text), "module"):
        assert isinstance(call.func, ast.Attribute)
        found.setdefault(f"{path} {function}", []).append(_shape(call))
    return {where: " | ".join(calls) for where, calls in found.items()}


def _walk(node: ast.AST, function: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute):
            receiver = ast.unparse(child.func.value).removeprefix("self.")
            if receiver in RECEIVERS:
                yield function, child
        yield from _walk(child, child.name if isinstance(child, ast.FunctionDef) else function)


def _shape(call: ast.Call) -> str:
    assert isinstance(call.func, ast.Attribute)
    words = [ast.unparse(argument) for argument in call.args]
    words += [f"{keyword.arg}={ast.unparse(keyword.value)}" for keyword in call.keywords]
    return f"{call.func.attr}({', '.join(words)})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("path", type=pathlib.Path, help="a wheel of vLLM, or a directory that holds it")
    parser.add_argument("--write", action="store_true", help=f"make this version the manifest, {MANIFEST.name}")
    options = parser.parse_args()
    text = "\n".join(lines_of(facts_of(open_tree(options.path)))) + "\n"
    if options.write:
        MANIFEST.write_text(text)
    else:
        sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
