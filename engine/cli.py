"""The `fullgraph` command: a verb, a YAML file and `--set key.path=value`; hardly another knob.

Knows the verbs and their arguments; what a verb does is in engine/commands/.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from engine.errors import FullgraphError
from engine.quick_import import import_quickly
from engine.world import launched_rank

# Verb -> module with `run(args, config) -> exit status`. Imported by name once the configuration is
# known to be right: FastAPI or torch take seconds to import, and no mistake should wait for either.
_COMMANDS = {
    "serve": "engine.commands.serve",
    "warmup": "engine.commands.warmup",
    "generate": "engine.commands.generate",
    "chat": "engine.commands.chat",
    "bench": "engine.commands.bench",
}
USER_MISTAKE = 2
INTERRUPTED = 128 + signal.SIGINT
BROKEN_PIPE = 128 + signal.SIGPIPE


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", type=Path, help="a YAML file")
    parser.add_argument(
        "--set",
        metavar="KEY.PATH=VALUE",
        dest="overrides",
        action="append",
        default=[],
        help="change one key of the file; the value is YAML; may be repeated",
    )


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: an integer >= 1")
    return int(text)


def _add_temperature(parser: argparse.ArgumentParser) -> None:
    text = "0: the likeliest token each time; default: the model's, or 1"
    parser.add_argument("--temperature", metavar="T", type=float, help=text)


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; imports nothing heavy."""
    parser = argparse.ArgumentParser(
        prog="fullgraph",
        description="An LLM inference server in which every token comes out of a compiled graph.",
        epilog="Every key a CONFIG can hold is in configs/default.yaml, with a comment.",
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)

    def verb(name: str, text: str) -> argparse.ArgumentParser:
        return verbs.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )

    serve = verb("serve", "serve the model over HTTP, as OpenAI's API does")
    _add_config(serve)
    for key in ("host", "port"):
        serve.add_argument(
            f"--{key}", metavar=key.upper(), dest="overrides", action="append",
            type=f"--{key} {{}}".format,
            help=f"the same as --set server.{key}={key.upper()}",
        )  # fmt: skip

    warmup = verb("warmup", "compile every graph, so that the next start takes seconds")
    _add_config(warmup)
    what = warmup.add_mutually_exclusive_group()
    what.add_argument(
        "--export", metavar="FILE", type=Path, dest="export_file",
        help="compile what is missing, then pack the compiled artefacts into FILE",
    )  # fmt: skip
    what.add_argument(
        "--import", metavar="FILE", type=Path, dest="import_file",
        help="unpack artefacts that --export wrote on an identical machine, then compile the rest",
    )  # fmt: skip
    what.add_argument(
        "--check", action="store_true",
        help="compile nothing; exit 0 if the artefacts are there, 1 if not",
    )  # fmt: skip

    generate = verb("generate", "continue prompts in the terminal, as they are")
    _add_config(generate)
    generate.add_argument(
        "prompts", metavar="PROMPT", nargs="*",
        help="one is streamed, several are batched; none: standard input is the prompt",
    )  # fmt: skip
    generate.add_argument(
        "--max-tokens", metavar="N", type=_positive,
        help="most tokens of each continuation; default: 512, or half the context if that is less",
    )  # fmt: skip

    chat = verb("chat", "talk to the model in the terminal; /reset forgets, /exit ends")
    _add_config(chat)
    for what_draws in (generate, chat):
        _add_temperature(what_draws)

    bench = verb("bench", "measure the engine with the programs in bench/")
    bench.add_argument("what", choices=("offline", "online", "startup"), help="which one")
    _add_config(bench)
    return parser


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The arguments. argparse before Python 3.13 does not take prompts behind a `--set`: we do."""
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest and (args.verb != "generate" or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        args.prompts += rest
    return args


def _import(module: str) -> ModuleType:
    """A module. Ctrl-C ends the process meanwhile: numpy and torch would swallow the
    exception, half imported.
    """
    before = signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    try:
        return import_quickly(module)
    finally:
        signal.signal(signal.SIGINT, before)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a verb.

    Args:
        argv: arguments without the program's name; None: sys.argv.

    Returns:
        The exit status: 0, 2 for a mistake of the user's (one line on stderr), 130 after Ctrl-C.
    """
    args = parse(argv)
    if launched_rank():  # torchrun's, and not rank 0: whatever the verb, this process follows
        os.execv(sys.executable, [sys.executable, "-m", "engine.rank_process"])
    try:
        config = _import("engine.preflight").load_to_start(args.config, args.overrides)
        status: int = _import(_COMMANDS[args.verb]).run(args, config)
    except FullgraphError as error:
        print(f"fullgraph: {error}", file=sys.stderr)
        return USER_MISTAKE
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # `fullgraph generate ... | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    return status
