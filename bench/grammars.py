"""What it costs that answers follow a grammar: the same requests with and without, in this process.

    python -m bench.grammars CONFIG [--set KEY.PATH=VALUE] [--streams 64] [--made-up 151643]

--made-up: a vocabulary of strings of up to three bytes, for shapes whose tokenizer is not at hand.
Prints a table; writes bench/results/NAME.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from bench.offline import fit
from bench.report import add_config, command_line, save, table
from bench.workloads import Job, uniform
from engine.config import load_config
from engine.llm import LLM
from engine.request import SamplingParams, StructuredOutputs

# None of them can end within --output tokens of a few bytes.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full variant": {"logprobs": 0},
    "regex": {"structured_outputs": StructuredOutputs(regex="[a-z ]{9000,}")},
    "json": {
        "structured_outputs": StructuredOutputs(
            json={"type": "array", "items": {"type": "string"}, "minItems": 9000}
        )
    },
}


def write_vocabulary(folder: Path, size: int) -> None:
    """A tokenizer of the strings of one byte, of two and of three, as far as there is room."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = list(letters)
    for token in tokens:  # grows while it is walked
        if len(tokens) >= size:
            break
        tokens += [token + letter for letter in letters[: size - len(tokens)]]
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens[:size])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))


def run(llm: LLM, jobs: Sequence[Job], options: dict[str, Any]) -> float:
    """Seconds for all of them at once."""
    params = [
        SamplingParams(max_tokens=job.num_output, temperature=1.0, seed=1, **options)
        for job in jobs
    ]
    begin = time.perf_counter()
    outputs = llm.generate([job.prompt_ids for job in jobs], params, progress=False)
    seconds = time.perf_counter() - begin
    assert all(len(o.token_ids) == j.num_output for o, j in zip(outputs, jobs, strict=True))
    return seconds


def measure(llm: LLM, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each kind: the fastest run after the first."""
    rows = []
    for kind, options in KINDS.items():
        seconds = []
        for repeat in range(1 + args.repeats):
            jobs = uniform(args.streams, args.input, args.output, seed=repeat)
            before = llm.engine.core.stats()
            seconds.append(run(llm, fit(jobs, llm.engine.model.vocab_size), options))
            after = llm.engine.core.stats(check=True)
        assert not after.integrity, after.integrity
        steps = after.steps_decode - before.steps_decode
        rows.append(
            {
                "kind": kind,
                "first_s": seconds[0],  # reads the vocabulary, or records graphs
                "seconds": min(seconds[1:]),
                "tokens_per_s": args.streams * args.output / min(seconds[1:]),
                "decode_steps": steps,
                "eager_steps": after.eager_steps - before.eager_steps,
                "recompiles": after.recompiles,
            }
        )
        print(table(rows), flush=True)
    return rows


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = command_line("grammars", __doc__, "grammars")
    add_config(parser)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--input", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--made-up", type=int, metavar="TOKENS", help="a vocabulary of so many")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    args = build_parser().parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        overrides = list(args.overrides)
        if args.made_up:
            write_vocabulary(Path(folder), args.made_up)
            overrides.append(f"model.tokenizer={folder}")
        with LLM(load_config(args.config, overrides)) as llm:
            rows = measure(llm, args)
    settings = {"streams": args.streams, "input": args.input, "output": args.output}
    print(save(args.name, {**settings, "made_up": args.made_up, "rows": rows}, args.results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
