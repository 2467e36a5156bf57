"""docs/kubernetes.md: its values are the chart's, its recipes are well formed, the connector takes their settings."""

from __future__ import annotations

import ast
import json
import pathlib
import re
from typing import Any

import pytest
import yaml

from kvxfer.connectors.vllm.options import ConnectorOptions
from kvxfer.coordinator.store.etcd import PREFIX
from kvxfer.trust.identity import CertIdentity
from tests.support.helm import engine_flags
from tests.support.helm.chart import CHART, VARIANTS, default_values

pytestmark = pytest.mark.checkout

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "kubernetes.md").read_text()
POD = {"$(POD_NAME)": "llama-prefill-predictor-0", "$(POD_IP)": "10.1.2.3"}


def blocks(language: str, section: str) -> list[str]:
    [text] = re.findall(rf"^##+ {section}\n(.*?)(?=^##+ |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


SECTIONS = ("Install", "Certificates for the coordinator", "Certificates of the routers", "Coordinators")


@pytest.mark.parametrize("section", SECTIONS)
def test_values_of_the_page_are_the_charts(section: str) -> None:
    def check(given: Any, known: Any, at: str) -> None:
        if isinstance(given, dict) and isinstance(known, dict) and known and at not in (".serviceMonitor.labels",):
            if at.endswith((".resources", ".labels")):
                return
            assert set(given) <= set(known), at
            for name, value in given.items():
                check(value, known[name], f"{at}.{name}")

    for text in blocks("yaml", section):
        check(yaml.safe_load(text), default_values(), "")


def test_each_value_that_the_page_names_is_there() -> None:
    parts = "tls|model|coordinator|router|workers|prefill|decode|networkPolicy|prometheusRule"
    named = set(re.findall(rf"`((?:{parts})\.[a-z]\w*(?:\.\w+)*)`", PAGE))
    named -= {"coordinator.llm.kvxfer.internal", "tls.crt", "tls.key"}
    assert len(named) > 10
    for name in named - {"decode.replicas"}:
        value: Any = default_values()
        for part in name.split("."):
            assert part in value, name
            value = value[part]


def test_the_page_has_the_numbers_and_names_of_the_code() -> None:
    assert f"`router.shutdownGraceSeconds` ({default_values()['router']['shutdownGraceSeconds']})" in PAGE
    assert f"below `{PREFIX.decode()}`" in " ".join(PAGE.split())  # why two releases cannot share an etcd


def test_the_kserve_recipe_gives_vllm_what_it_takes() -> None:
    [text] = blocks("yaml", "KServe")
    service = yaml.safe_load(text)
    (container,) = service["spec"]["predictor"]["containers"]
    flags = dict(word.split("=", 1) for word in container["args"] if word.startswith("--"))
    assert set(flags) <= engine_flags.VLLM_FLAGS
    words = flags["--kv-transfer-config"]
    for name, value in POD.items():
        words = words.replace(name, value)
    transfer = json.loads(words)
    options = ConnectorOptions.from_config(transfer["kv_role"], None, transfer["kv_connector_extra_config"])
    assert options.http_url == f"http://10.1.2.3:{flags['--port']}"
    assert container["readinessProbe"]["httpGet"]["path"] == engine_flags.HEALTH
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    assert options.token_file == f"{mounts['secrets']}/cluster-token"
    assert service["spec"]["predictor"]["enableServiceLinks"] is False


def test_the_ray_recipe_gives_the_connector_what_it_takes() -> None:
    [text] = blocks("python", "Ray Serve")
    found = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict) and isinstance(node.targets[0], ast.Name):
            names = [key.value for key in node.value.keys if isinstance(key, ast.Constant)]
            values = [one.value if isinstance(one, ast.Constant) else None for one in node.value.values]
            found[node.targets[0].id] = dict(zip(names, values, strict=True))
    extra = {**found["extra"], "advertise_host": "10.1.2.3"}
    for role in ("kv_producer", "kv_consumer"):
        assert f'config("{role}")' in text
        assert ConnectorOptions.from_config(role, "engine", extra).discovery
    assert found["transfer"]["kv_connector"] == "KvxferConnector"
    assert (ROOT / "kvxfer" / "connectors" / "vllm").is_dir()


def test_the_page_counts_what_is_rendered() -> None:
    assert f"{len(VARIANTS)} sets of values" in PAGE
    for script in re.findall(r"`(files/[\w.]+)`", PAGE):
        assert (CHART / script).is_file()


def test_the_names_that_certificates_must_have_are_those_that_the_chart_asks_for() -> None:
    row = r"^\| (\w+) \| `(kvxfer://\S+)` \| (?:`(\S+)`)? ?\| `RELEASE-kvxfer-(\S+)` \|$"
    rows = re.findall(row, PAGE, re.MULTILINE)
    template = (CHART / "templates" / "monitoring.yaml").read_text()
    assert '"kvxfer://%s/%s/%s" $root.Values.tls.grpc.cluster $component $component' in template
    assert len(rows) == 4
    for component, uri, host, secret in rows:
        identity = CertIdentity.parse(uri)
        assert (str(identity.role), identity.name) == (component, component)
        assert host == (identity.coordinator_host if component == "coordinator" else "")
        assert secret == f"{component}-grpc"
