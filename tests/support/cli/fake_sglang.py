"""Stands in for the Python of SGLang's environment: whatever server is asked for answers with made up tokens.
``FAKE_DIES`` names one (prefill, decode, one, router) that ends as it starts, ``FAKE_LIES`` one whose tokens are
others, ``FAKE_HANGS`` one that never answers.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import sys
import time

METRICS = """\
sglang:kvxfer_loads_total{lane="cma",outcome="committed",tp_rank="0"} 2.0
sglang:kvxfer_loads_total{lane="unix",outcome="committed",tp_rank="0"} 1.0
sglang:kvxfer_bytes_total{tp_rank="0"} 524288.0
sglang:kvxfer_early_bytes_total{tp_rank="0"} 1024.0
kvxfer_transfers_total{lane="ucx",outcome="committed"} 0.0
"""

parser = argparse.ArgumentParser()
parser.add_argument("-m", dest="module")
parser.add_argument("--port", type=int)
parser.add_argument("--host")
parser.add_argument("--disaggregation-mode", default="one")
options, _ = parser.parse_known_args()
name = "router" if options.module == "sglang_router.launch_router" else options.disaggregation_mode
assert options.host == "127.0.0.1"
print(f"{name} begins", flush=True)
if os.environ.get("FAKE_DIES") == name:
    sys.exit("no such device")
if os.environ.get("FAKE_HANGS") == name:
    time.sleep(600)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(METRICS.encode() if self.path == "/metrics" else b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        token = len(body["input_ids"]) + (os.environ.get("FAKE_LIES") == name)
        self.answer(json.dumps({"output_ids": [token] * body["sampling_params"]["max_new_tokens"]}).encode())

    def answer(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


http.server.ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
