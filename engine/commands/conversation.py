"""A conversation in the terminal: lines in, answers out, messages kept. Knows nothing of models.

/reset forgets the messages, /exit (or Ctrl-D) ends, Ctrl-C stops an answer.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator

from engine.errors import RequestError

with contextlib.suppress(ImportError):  # not there on every platform
    import readline  # noqa: F401  (gives input() line editing and history)

Message = dict[str, str]
Answer = Callable[[list[Message]], Iterator[str]]
HELP = "/reset forgets the conversation, /exit ends it"


def read_lines(prompt: str) -> Iterator[str]:
    """Lines that the user types, until the end of the input."""
    while True:
        try:
            yield input(prompt)
        except EOFError:
            return
        except KeyboardInterrupt:  # Ctrl-C at the prompt drops the line
            print()


def converse(lines: Iterable[str], answer: Answer) -> None:
    """Hold the conversation: print the answer to each line, keep both in the history.

    Args:
        lines: what the user says.
        answer: messages so far to pieces of the next answer's text.
    """
    messages: list[Message] = []
    for line in lines:
        text = line.strip()
        if text == "/exit":
            return
        if text == "/reset":
            messages = []
        elif text.startswith("/"):
            print(HELP)
        elif text:
            messages = _turn(messages, text, answer)


def _turn(messages: list[Message], text: str, answer: Answer) -> list[Message]:
    """The history after one question; unchanged where the question was refused."""
    question: Message = {"role": "user", "content": text}
    pieces: list[str] = []
    try:
        for piece in answer([*messages, question]):
            pieces.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:  # keep what was said so far
        pass
    except RequestError as error:  # too long for the context, most likely
        print(f"{error} (/reset forgets the conversation)", file=sys.stderr)
        return messages
    print()
    return [*messages, question, {"role": "assistant", "content": "".join(pieces)}]
