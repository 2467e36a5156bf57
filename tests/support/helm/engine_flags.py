"""What the chart gives to engines that are not kvxfer's. ``tests/vllm/test_chart_flags.py`` and
``tests/sglang/test_chart_flags.py`` ask the engines themselves whether they have it."""

from __future__ import annotations

VLLM_FLAGS = frozenset(
    {
        *("--served-model-name", "--host", "--port", "--kv-transfer-config", "--shutdown-timeout", "--middleware"),
    }
)
SGLANG_FLAGS = frozenset(
    {
        *("--model-path", "--served-model-name", "--host", "--port", "--enable-metrics", "--disaggregation-mode"),
        *("--disaggregation-transfer-backend", "--disaggregation-bootstrap-port"),
    }
)
SGLANG_VARIABLES = frozenset({"SGLANG_HOST_IP"})
HEALTH = "/health"
"""Of both: 200 once they serve."""
VLLM_WAITING = "vllm:num_requests_waiting"
SGLANG_WAITING = "sglang:num_queue_reqs"
HUB_COMMAND = ["hf", "download"]
