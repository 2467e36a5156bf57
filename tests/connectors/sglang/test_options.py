"""Settings from the environment: defaults, bounds, and a name in every refusal."""

from __future__ import annotations

import pytest

from kvxfer.connectors.sglang.memory import Buffers
from kvxfer.connectors.sglang.options import Options
from kvxfer.errors import ConfigError
from kvxfer.types import Lane


def test_nothing_set_is_the_default() -> None:
    assert Options.from_environment({"PATH": "/bin", "KVXFER_LANES": "stream", "KVXFER_SGLANG_HOST": ""}) == Options()
    assert Options().agent_config().discovery


def test_everything_can_be_set() -> None:
    environ = {
        "KVXFER_SGLANG_HOST": "0.0.0.0",
        "KVXFER_SGLANG_ADVERTISE": "node-3",
        "KVXFER_SGLANG_INSECURE": "1",
        "KVXFER_SGLANG_COORDINATOR": "node-1:7400",
        "KVXFER_SGLANG_TOKEN_FILE": "/run/token",
        "KVXFER_SGLANG_COORDINATOR_CA_FILE": "/run/ca.pem",
        "KVXFER_SGLANG_COORDINATOR_CERT_FILE": "/run/p0.pem",
        "KVXFER_SGLANG_COORDINATOR_KEY_FILE": "/run/p0.key",
        "KVXFER_SGLANG_LANES": "ucx, stream",
        "KVXFER_SGLANG_CHECKSUM": "sampled",
        "KVXFER_SGLANG_STRIPES": "4",
        "KVXFER_SGLANG_TIMEOUT_S": "30",
        "KVXFER_SGLANG_UNKNOWN_WAIT_S": "1.5",
        "KVXFER_SGLANG_ENGINE_SILENT_S": "20",
        "KVXFER_SGLANG_DEADLINE_S": "60",
    }
    options = Options.from_environment(environ)
    lanes = (Lane.UCX, Lane.STREAM)
    assert options == Options(
        host="0.0.0.0",
        advertise="node-3",
        insecure=True,
        coordinator="node-1:7400",
        token_file="/run/token",
        coordinator_ca_file="/run/ca.pem",
        coordinator_cert_file="/run/p0.pem",
        coordinator_key_file="/run/p0.key",
        lanes=lanes,
        checksum="sampled",
        stripes=4,
        timeout_s=30.0,
        unknown_wait_s=1.5,
        engine_silent_s=20.0,
        deadline_s=60.0,
    )
    config = options.agent_config()
    assert (config.bind_host, config.advertise_host, config.insecure) == ("0.0.0.0", "node-3", True)
    assert (config.discovery, config.lanes, config.stripes) == (False, lanes, 4)
    assert (config.grant_wait_s, config.unknown_wait_s, config.engine_silent_s) == (30.0, 1.5, 20.0)
    assert config.transfer_deadline_s == 60.0
    files = config.coordinator_ca_file, config.coordinator_cert_file, config.coordinator_key_file
    assert files == ("/run/ca.pem", "/run/p0.pem", "/run/p0.key")


@pytest.mark.parametrize(
    ("variable", "text", "says"),
    [
        ("KVXFER_SGLANG_HOSTS", "x", "is not a setting; known are KVXFER_SGLANG_HOST, "),
        ("KVXFER_SGLANG_host", "x", "is not a setting"),
        ("KVXFER_SGLANG_INSECURE", "maybe", "must be 1 or 0"),
        ("KVXFER_SGLANG_COORDINATOR", "node-1", "must be host:port"),
        ("KVXFER_SGLANG_COORDINATOR_CERT_FILE", "p0.pem", "needs KVXFER_SGLANG_COORDINATOR"),
        ("KVXFER_SGLANG_COORDINATOR_CA_FILE", "ca.pem", "needs KVXFER_SGLANG_COORDINATOR_CERT_FILE"),
        ("KVXFER_SGLANG_LANES", "stream,rdma", "must name some of"),
        ("KVXFER_SGLANG_CHECKSUM", "always", "must be one of"),
        ("KVXFER_SGLANG_CHECKS", "on", "is called KVXFER_SGLANG_CHECKSUM now"),
        ("KVXFER_SGLANG_STRIPES", "many", "must be a whole number"),
        ("KVXFER_SGLANG_TIMEOUT_S", "soon", "must be a number of seconds"),
        ("KVXFER_SGLANG_TIMEOUT_S", "nan", "must be above 0"),
        ("KVXFER_SGLANG_UNKNOWN_WAIT_S", "0", "must be above 0"),
        ("KVXFER_SGLANG_ENGINE_SILENT_S", "-1", "must be above 0"),
        ("KVXFER_SGLANG_DEADLINE_S", "1e9", "must be above 0 and at most 86400"),
    ],
)
def test_wrong_variable_is_named_in_the_error(variable: str, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=f"^{variable} {says}"):
        Options.from_environment({variable: text})


@pytest.mark.parametrize("stripes", ["0", "65"])
def test_a_number_of_stripes_that_there_cannot_be_is_refused(stripes: str) -> None:
    with pytest.raises(ConfigError, match=r"KVXFER_SGLANG_\*: stripes must be 1 to 64"):
        Options.from_environment({"KVXFER_SGLANG_STRIPES": stripes})


@pytest.mark.parametrize(
    "lists", [((), (), ()), ((1,), (2, 3), (1,)), ((0,), (2,), (1,)), ((1,), (2,), (3,)), ((1,), (2,), (0,))]
)
def test_buffers_that_are_none_are_refused(lists: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ConfigError):
        Buffers(*lists)


def test_the_shortest_buffer_says_how_many_rows_there_are() -> None:
    buffers = Buffers((1000, 400), (105, 64), (10, 16))
    assert (buffers.count, buffers.row_bytes, buffers.base, buffers.span_bytes) == (4, 26, 400, 705)
