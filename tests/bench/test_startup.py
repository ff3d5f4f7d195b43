"""The startup benchmark against a server of three lines: times, phases, failures."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from bench.server_process import ServerFailed, free_port
from bench.startup import Start, measure_start, parse_counters, read_phases, rows

SERVER = """
import http.server, json, os, sys, time
begin = time.monotonic()
open(os.environ["FULLGRAPH_STARTUP_JSON"], "w").write(json.dumps({"weights": 0.25, "note": "x"}))
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self, status, body):
        self.send_response(status); self.end_headers(); self.wfile.write(body)
    def do_GET(self):
        late = time.monotonic() - begin < 0.3
        self.answer(*{
            "/health": (503 if late else 200, b""),
            "/v1/models": (200, b'{"data": [{"id": "m"}]}'),
            "/metrics": (200, b"# HELP fullgraph_recompiles x\\nfullgraph_recompiles 0.0\\n"),
        }[self.path])
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["stream"] and body["model"] == "m", body
        if body["prompt"] == "bad":
            return self.answer(400, b"no")
        if body["prompt"] == "nothing":
            return self.answer(200, b"data: [DONE]\\n\\n")
        time.sleep(0.2)
        self.answer(200, b'data: {"choices": []}\\n\\ndata: [DONE]\\n\\n')
    def log_message(self, *args): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def start(tmp_path: Path, prompt: str = "Hello", code: str = SERVER) -> Start:
    port = free_port()
    command = [sys.executable, "-c", code, str(port)]
    return measure_start(command, f"http://127.0.0.1:{port}", prompt, tmp_path, os.environ)


def test_a_start_is_timed(tmp_path: Path) -> None:
    measured = start(tmp_path)
    assert 0.3 < measured.ready < measured.first_token - 0.2
    assert measured.phases == {"weights": 0.25}
    assert measured.counters == {"fullgraph_recompiles": 0.0}


@pytest.mark.parametrize(
    ("prompt", "code", "message"),
    [
        ("bad", SERVER, "400"),
        ("nothing", SERVER, "without a token"),
        ("Hello", "raise SystemExit('no such model')", "status 1:\nno such model"),
    ],
)
def test_failures_are_told(tmp_path: Path, prompt: str, code: str, message: str) -> None:
    with pytest.raises(ServerFailed, match=message):
        start(tmp_path, prompt, code)


def test_phases_file_that_is_missing_or_garbage(tmp_path: Path) -> None:
    assert read_phases(tmp_path / "missing") == {}
    (tmp_path / "garbage").write_text("{")
    assert read_phases(tmp_path / "garbage") == {}


def test_counters_that_matter() -> None:
    text = "# TYPE a gauge\nfullgraph_eager_steps_total 3\nfullgraph_eager_steps_created 1e9\nx 1\n"
    assert parse_counters(text) == {"fullgraph_eager_steps_total": 3.0}


def test_the_table_has_phases_then_totals() -> None:
    cold = Start(20.0, 21.0, {"weights": 1.0, "graphs": 15.0})
    warm = [Start(5.0 + i, 6.0 + i, {"weights": 1.0, "graphs": 2.0 + i}) for i in range(3)]
    lines = rows(cold, warm)
    assert [line["seconds"] for line in lines] == ["  weights", "  graphs", "ready", "first token"]
    assert (lines[1]["cold"], lines[1]["warm"]) == (15.0, 3.0)
    assert (lines[3]["warm"], lines[3]["warm min .. max"]) == (7.0, "6.00 .. 8.00")
