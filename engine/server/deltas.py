"""From a choice's token ids to what its client is given next: text, logprobs, finish reason.

The same for streamed and whole answers. Knows nothing of JSON.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.detokenizer import Detokenizer
from engine.open_requests import Choice
from engine.request import FINISH_LENGTH, FINISH_STOP, TokenLogprobs
from engine.server.prompts import Prompt
from engine.server.protocol import Job
from engine.tokenizer import Tokenizer


@dataclass(slots=True)
class Delta:
    """What is new in a choice.

    Attributes:
        text: to append; the prompt too, with echo.
        token_ids: generated, up to the one that ended the choice.
        logprob_ids / logprobs / offsets: parallel, where logprobs were asked for: the ids reported
            on (the prompt's too, with echo), None for the prompt's first, and where in the text
            each token begins.
        finish_reason: None while more may come.
    """

    text: str
    token_ids: list[int]
    logprob_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None


class ChoiceText:
    """The text of one choice as it grows.

    Args:
        tokenizer: whose ids they are.
        job: how the text is wanted.
        index: prompt * n + choice.

    Attributes:
        num_tokens: given to the client so far.
    """

    def __init__(self, tokenizer: Tokenizer, job: Job, index: int) -> None:
        self._tokenizer = tokenizer
        self._job = job
        self._prompt = job.prompts[index // job.params.n]
        self._echo_due = job.echo
        self._offset = 0  # of the generated text's first character
        self._detokenizer = Detokenizer(
            tokenizer,
            job.params.stop,
            skip_special_tokens=job.params.skip_special_tokens,
            prompt_ids=self._prompt.token_ids if job.kind == "completion" else (),
            min_tokens=job.params.min_tokens,
        )
        self.num_tokens = 0
        # No part of a text is held back, reported on or cut off.
        self._plain = not (job.params.stop or job.params.logprobs is not None or job.echo)

    def prompt_alone(self) -> Delta:
        """The whole answer when nothing is to be generated."""
        delta = Delta("", [], finish_reason=FINISH_LENGTH)
        self._echo(delta, [])
        return delta

    def advance(self, choice: Choice) -> Delta | None:
        """Take what came for the choice; None when there is nothing to tell the client."""
        ids, logprobs = choice.take()
        finished = choice.finished
        if finished is None and (self._plain or not ids):
            self.num_tokens += len(ids)
            text = self._detokenizer.add(ids)
            return Delta(text, ids) if text or (ids and self._job.return_token_ids) else None
        stopped_by_id = finished is not None and finished.stop_id >= 0
        delta = self._take(ids[:-1] if stopped_by_id else ids)
        if self._detokenizer.stopped is None and finished is not None:
            delta.finish_reason = finished.reason
            delta.text += self._detokenizer.finish()
            if stopped_by_id:
                delta.token_ids.append(ids[-1])
                if self._job.params.logprobs is not None:
                    delta.offsets.append(self._offset + self._detokenizer.num_characters)
        if self._detokenizer.stopped is not None:
            delta.finish_reason = FINISH_STOP
        self.num_tokens += len(delta.token_ids)
        if self._job.params.logprobs is not None:
            delta.logprob_ids = list(delta.token_ids)
            delta.logprobs = list(logprobs[: len(delta.token_ids)])
        if self._echo_due:
            self._echo(delta, choice.prompt_logprobs)
        quiet = not (delta.text or delta.finish_reason or self._job.return_token_ids)
        return None if quiet and not delta.logprobs else delta

    def _take(self, ids: list[int]) -> Delta:
        detokenizer, before = self._detokenizer, self._detokenizer.num_tokens
        if self._job.params.logprobs is None:
            text = detokenizer.add(ids)
            return Delta(text, ids[: detokenizer.num_tokens - before])
        pieces, offsets = [], []
        for token_id in ids:
            if detokenizer.stopped is not None:
                break
            offsets.append(self._offset + detokenizer.num_characters)
            pieces.append(detokenizer.add((token_id,)))
        return Delta("".join(pieces), ids[: len(offsets)], offsets=offsets)

    def _echo(self, delta: Delta, prompt_logprobs: list[TokenLogprobs]) -> None:
        """Put the prompt before the first delta."""
        self._echo_due = False
        prompt = self._prompt
        text, offsets = self._prompt_text(prompt)
        delta.text = text + delta.text
        self._offset = len(text)
        if self._job.params.logprobs is None:
            return
        assert len(prompt_logprobs) == len(prompt.token_ids) - 1, "prompt logprobs are missing"
        delta.logprob_ids = prompt.token_ids + delta.logprob_ids
        delta.logprobs = [None, *prompt_logprobs, *delta.logprobs]
        delta.offsets = offsets + [self._offset + offset for offset in delta.offsets]

    def _prompt_text(self, prompt: Prompt) -> tuple[str, list[int]]:
        """The prompt's text, and where in it each of its tokens begins."""
        detokenizer = Detokenizer(
            self._tokenizer, skip_special_tokens=self._job.params.skip_special_tokens
        )
        pieces, offsets = [], []
        for token_id in prompt.token_ids:
            offsets.append(detokenizer.num_characters)
            pieces.append(detokenizer.add((token_id,)))
        pieces.append(detokenizer.finish())
        return "".join(pieces) if prompt.text is None else prompt.text, offsets
