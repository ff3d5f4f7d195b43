"""What the HTTP side alone can stream: a server of ours over an engine that computes nothing.

    python -m bench.http_side [--streams 256] [--tokens 256] [--step-ms 8] [--clients 4]

Prints and saves tokens a second as the clients saw them, and CPU time a token of the API process,
whose inverse is the most that it can do. The tokenizer is made up: byte-level, `--vocab` tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.hollow_engine import VARIABLE
from bench.online import Target, drive_all
from bench.report import command_line, save, table
from bench.server_process import free_port, stop, wait_until_healthy
from bench.workloads import Job, uniform

MODEL = "hollow"
_TICKS = os.sysconf("SC_CLK_TCK")
_SERVER = """
import sys
from engine.config import EngineConfig
from engine.engine_launch import launched
from engine.server.app import create_app
from engine.server.lifecycle import run_server
from engine.server.listener import listen
from engine.tokenizer import load_tokenizer
config = EngineConfig.model_validate_json(sys.argv[1])
load = lambda: load_tokenizer(config.model)
make = lambda client, ready: create_app(config, client, load, ready)
listener = listen(config.server.host, config.server.port)
with launched(config, "bench.hollow_engine") as transport:
    status = run_server(config, make, transport, listener)
sys.exit(status)
"""


def write_tokenizer(folder: Path, size: int) -> None:
    """A byte-level BPE of `size` tokens of one to five letters."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", "\u0120"]
    tokens = list(letters)
    for token in tokens:  # grows while it is walked
        tokens += [token + letter for letter in letters[: size - len(tokens)]]
        if len(tokens) >= size:
            break
    model = models.BPE({token: index for index, token in enumerate(tokens)}, [])
    backend = Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


@contextmanager
def hollow_server(args: argparse.Namespace) -> Iterator[tuple[str, int]]:
    """Its URL and the API process's id."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), args.vocab)
        port = free_port()
        config = {
            "model": {"path": folder, "served_name": MODEL},
            "server": {"port": port},
            "log": {"progress": "none"},
        }
        longest = args.input + args.tokens
        options = {"step_s": args.step_ms / 1e3, "vocab_size": args.vocab}
        options |= {"max_model_len": longest, "max_running": args.streams}
        server = subprocess.Popen(
            [sys.executable, "-c", _SERVER, json.dumps(config)],
            env={**os.environ, VARIABLE: json.dumps(options)},
        )
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until_healthy(url, server)
            yield url, server.pid
        finally:
            stop(server)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def load(url: str, jobs: Sequence[Job], clients: int) -> tuple[int, float]:
    """Tokens received and seconds from the first request to the last token."""
    answers = drive_all(Target(url, MODEL, {}, 600.0), jobs, len(jobs), clients)
    errors = {answer.error for answer in answers if answer.error}
    assert not errors, errors
    sent = min(answer.sent for answer in answers)
    last = max(answer.arrivals[-1] for answer in answers)
    return sum(answer.num_output for answer in answers), last - sent


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """One run after a short one."""
    with hollow_server(args) as (url, pid):
        load(url, uniform(args.streams, args.input, 8, num_ids=args.vocab), args.clients)
        before = cpu_seconds(pid)
        jobs = uniform(args.streams, args.input, args.tokens, num_ids=args.vocab)
        tokens, seconds = load(url, jobs, args.clients)
        cpu = max(cpu_seconds(pid) - before, 1 / _TICKS)
    return {
        "streams": args.streams,
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "api_cpu_us_a_token": 1e6 * cpu / tokens,
        "api_most_tokens_per_s": tokens / cpu,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = command_line("http_side", __doc__, "http_side")
    add = parser.add_argument
    add("--streams", type=int, default=256, help="requests open at once")
    add("--input", type=int, default=128, help="prompt tokens")
    add("--tokens", type=int, default=256, help="generated tokens a request")
    add("--step-ms", type=float, default=8.0, help="a step of the engine; 0: as fast as it can")
    add("--clients", type=int, default=4, help="client processes")
    add("--vocab", type=int, default=50_000)
    args = parser.parse_args(argv)
    result = measure(args)
    print(table([result]))
    print(f"\n{save(args.name, result, args.results)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
