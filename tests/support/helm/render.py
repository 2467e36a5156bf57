"""Renders a chart for many values with Helm's own engine, and validates what comes out against Kubernetes' schemas.

Runs in the environment that has ``helm_python`` and ``kubernetes_validate``: ``python render.py CHART < values.json``.
Reads a mapping of names to values, and prints a mapping of names to ``objects`` (what was rendered, as text), or
``error``; and ``invalid``, what Kubernetes' schemas say of the objects. Kinds that Kubernetes itself does not have are
not validated. It must never import kvxfer.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

import yaml

KUBERNETES = "1.34"
NATIVE = ("v1", "apps/v1", "policy/v1", "autoscaling/v2", "networking.k8s.io/v1", "rbac.authorization.k8s.io/v1")


def rendered(chart: Any, values: dict[str, Any]) -> str:
    """All manifests of ``chart``, in the order of their files. Raises HelmError for values that it refuses."""
    chart.validate_schema(values)
    files: dict[str, str] = chart.render(values, name="test", namespace="space")
    return "\n---\n".join(text for name, text in sorted(files.items()) if name.endswith(".yaml"))


def invalid(text: str, validate: Any) -> list[str]:
    """What Kubernetes' schemas refuse, and which objects: none for what is right."""
    found = []
    for value in yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        if value and value["apiVersion"] in NATIVE:
            try:
                validate.validate(value, KUBERNETES, strict=True)
            except validate.ValidationError as error:
                found.append(f"{value['kind']} {value['metadata']['name']}: {error.message}")
    return found


def main() -> None:
    helm: Any = importlib.import_module("helm_python")
    validate: Any = importlib.import_module("kubernetes_validate")
    answer: dict[str, Any] = {}
    with helm.Chart.load(sys.argv[1]) as chart:
        for name, values in json.load(sys.stdin).items():
            try:
                text = rendered(chart, values)
            except helm.HelmError as error:
                answer[name] = {"error": str(error)}
            else:
                answer[name] = {"text": text, "invalid": invalid(text, validate)}
    messages = helm.lint(sys.argv[1], strict=True)["messages"]
    json.dump({"variants": answer, "lint": [one["error"] for one in messages if one["severity"] > 1]}, sys.stdout)


if __name__ == "__main__":
    main()
