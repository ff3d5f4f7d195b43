"""LLM: the engine in this process, for scripts and the terminal. The server's core, no sockets.

    llm = LLM("configs/smollm2_cpu.yaml")
    for out in llm.generate(["The capital of France is"], SamplingParams(max_tokens=16)):
        print(out.text)

One caller at a time. Knows nothing of HTTP.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import reprlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeGuard

from engine.admission import RequestLimits, build_requests
from engine.config import EngineConfig
from engine.detokenizer import Detokenizer
from engine.errors import EngineDead, FullgraphError, InvalidRequest
from engine.interrupts import uninterrupted
from engine.preflight import load_to_start
from engine.request import (
    FINISH_STOP,
    EngineRequest,
    Finished,
    SamplingParams,
    StepOutput,
    TokenLogprobs,
)
from engine.startup import start_engine
from engine.terminal import ProgressDisplay
from engine.tokenizer import load_tokenizer

Prompt = str | Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True)
class RequestOutput:
    """One choice of one prompt.

    Attributes:
        prompt_index / choice: which prompt, and which of its n choices.
        prompt_ids / token_ids: ids in and out; a stop id that ended the text is not among them.
        text: of token_ids, cut before a stop string.
        finish_reason: "stop" or "length".
        logprobs: one entry per id of token_ids where asked for, else empty.
        prompt_logprobs: one entry per prompt token but the first where asked for, else empty.
        num_cached_tokens: prompt tokens found in the prefix cache.
        first_token_s / total_s: seconds from the call to the first and the last token.
    """

    prompt_index: int
    choice: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...]
    prompt_logprobs: tuple[TokenLogprobs, ...]
    num_cached_tokens: int
    first_token_s: float
    total_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class TextDelta:
    """A piece of a streamed answer. finish_reason is None in all but the last."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None


@dataclasses.dataclass(slots=True, eq=False)
class _Choice:
    """One open request: what has come so far. `start` is the call's time.perf_counter()."""

    request: EngineRequest
    prompt_index: int
    choice: int
    detokenizer: Detokenizer | None
    start: float
    token_ids: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    text: list[str] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0

    def add(self, token_id: int, logprob: TokenLogprobs | None) -> None:
        """One sampled id; afterwards finish_reason says whether a stop string ended the text."""
        if not self.token_ids:
            self.first_token_s = time.perf_counter() - self.start
        if token_id in self.request.stop_ids and len(self.token_ids) >= self.request.min_tokens:
            return  # ends the request, is no part of its text; Finished follows
        self.token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        if self.detokenizer is not None:
            self.text.append(self.detokenizer.add([token_id]))
            if self.detokenizer.stopped:
                self.finish_reason = FINISH_STOP

    def finish(self, finished: Finished | None) -> None:
        """The engine (or with None a stop string) ended it."""
        self.total_s = time.perf_counter() - self.start
        if finished is not None:
            self.num_cached_tokens = finished.num_cached_tokens
            self.finish_reason = self.finish_reason or finished.reason
        if self.detokenizer is not None:
            self.text.append(self.detokenizer.finish())

    def output(self) -> RequestOutput:
        assert self.finish_reason is not None
        return RequestOutput(
            self.prompt_index,
            self.choice,
            tuple(self.request.prompt_ids),
            tuple(self.token_ids),
            "".join(self.text),
            self.finish_reason,
            tuple(self.logprobs),
            tuple(self.prompt_logprobs),
            self.num_cached_tokens,
            self.first_token_s,
            self.total_s,
        )


class LLM:
    """A model, ready to generate.

    Args:
        config: a YAML file or a loaded configuration.
        overrides: `key.path=value` settings on top of a file.

    Raises:
        ConfigError, ModelError: it cannot start; the message says why.
    """

    def __init__(self, config: str | Path | EngineConfig, overrides: Sequence[str] = ()) -> None:
        if not isinstance(config, EngineConfig):
            config = load_to_start(Path(config), overrides)
        self.config = config
        with ProgressDisplay(config.log.progress) as display:
            self.tokenizer = load_tokenizer(config.model) if _has_tokenizer(config) else None
            self.engine = start_engine(config, display.update)
        resolved = self.engine.config
        self._progress = config.log.progress
        length, vocab_size = resolved.model.max_model_len, self.engine.model.vocab_size
        kv_tokens = self.engine.num_pages * resolved.kv.page_size
        self._limits = RequestLimits.of(resolved, length, vocab_size, kv_tokens)
        self._ids = itertools.count()
        self._closed = False

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the graphs, threads and memory. The object is of no use afterwards."""
        self._closed = True
        self.engine.close()

    def default_params(self, **fields: Any) -> SamplingParams:
        """SamplingParams with the model's recommended values, and `fields` on top."""
        known = self.tokenizer.sampling_defaults if self.tokenizer is not None else {}
        return SamplingParams(**{**known, **fields})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Continue each prompt, all together; those with the most tokens to come begin first.

        Args:
            prompts: a text, token ids, or a list of either.
            params: one for all, or one per prompt; default: the model's recommended values.
            progress: show a bar on standard error.

        Returns:
            One output per choice, in the order of the prompts, a prompt's choices in a row.

        Raises:
            InvalidRequest: names what is wrong; nothing was run.
            FullgraphError: the engine failed a request (non-finite logits).
        """
        several = _as_prompts(prompts)
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params()] * len(several)
        each: list[Any] = list(params) if _is_collection(params) else [params]
        if not all(isinstance(p, SamplingParams) for p in each):
            raise InvalidRequest("params: allowed: SamplingParams, or one for each prompt")
        if len(each) != len(several):
            raise InvalidRequest(
                f"params: got {len(each)}, allowed: one for all prompts, or one for each of "
                f"{len(several)}"
            )
        start = time.perf_counter()
        # What runs longest begins first, so that fewer steps are left to a few rows at the end.
        order = sorted(range(len(several)), key=lambda i: -_most_tokens(each[i]))
        choices = [c for i in order for c in self._choices(several[i], each[i], i, start)]
        outputs: list[RequestOutput] = []
        with ProgressDisplay(self._progress if progress else "none") as display:
            for ended in self._run(choices):
                # Now, while others run: at the end the device would wait for all of them.
                outputs += [choice.output() for choice in ended]
                if ended:
                    display.update("requests", len(outputs), len(choices))
        return sorted(outputs, key=lambda output: (output.prompt_index, output.choice))

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[TextDelta]:
        """The pieces of one answer as they come. Closing the iterator aborts the request."""
        params = params or self.default_params()
        if params.n != 1:
            raise InvalidRequest.of("n", f"got {params.n}, allowed: 1 when streaming")
        [choice] = self._choices(prompt, params, 0, time.perf_counter())
        shown_ids = shown_pieces = 0
        for _ in self._run([choice]):
            text = "".join(choice.text[shown_pieces:])
            ids = tuple(choice.token_ids[shown_ids:])
            shown_ids, shown_pieces = len(choice.token_ids), len(choice.text)
            if text or choice.finish_reason is not None:
                yield TextDelta(text, ids, choice.finish_reason)

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None
    ) -> RequestOutput:
        """The assistant's next message."""
        [output] = self.generate(
            self._chat_ids(messages), params or self.default_params(max_tokens=None), progress=False
        )
        return output

    def stream_chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None
    ) -> Iterator[TextDelta]:
        """The assistant's next message in pieces."""
        params = params or self.default_params(max_tokens=None)
        return self.stream(self._chat_ids(messages), params)

    def _chat_ids(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        if self.tokenizer is None:
            raise InvalidRequest.of("messages", "the model has no tokenizer")
        several: list[Any] = list(messages) if _is_collection(messages) else [None]
        if not all(isinstance(message, Mapping) for message in several):
            got = reprlib.repr(messages)
            raise InvalidRequest.of("messages", f"got {got}, allowed: a list of messages")
        return self.tokenizer.encode_chat(several, check=self._limits.room)

    def _choices(
        self, prompt: object, params: SamplingParams, index: int, start: float
    ) -> list[_Choice]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise InvalidRequest("prompt: got a text, but the model has no tokenizer")
            prompt = self.tokenizer.encode(prompt, check=self._limits.room) if prompt else []
        if not _is_collection(prompt):
            got = reprlib.repr(prompt)
            raise InvalidRequest.of("prompt", f"got {got}, allowed: a text, or token ids")
        if self._closed:
            raise FullgraphError("the LLM is closed")
        if params.stop and self.tokenizer is None:
            raise InvalidRequest.of("stop", "the model has no tokenizer")
        eos_ids = self.tokenizer.eos_ids if self.tokenizer else self.engine.model.eos_ids
        requests = build_requests(prompt, params, self._limits, eos_ids, lambda: next(self._ids))
        return [
            _Choice(request, index, choice, self._detokenizer(params), start)
            for choice, request in enumerate(requests)
        ]

    def _detokenizer(self, params: SamplingParams) -> Detokenizer | None:
        if self.tokenizer is None:
            return None
        return Detokenizer(
            self.tokenizer, stop=params.stop, skip_special_tokens=params.skip_special_tokens
        )

    def _run(self, choices: Sequence[_Choice]) -> Iterator[list[_Choice]]:
        """Step until all have ended; yields those that did so after each step with output."""
        core = self.engine.core
        waiting = list(reversed(choices))
        open_choices: dict[int, _Choice] = {}
        most = self.config.scheduler.max_waiting or 1  # the queue is bounded
        step_tokens = self.engine.config.scheduler.max_step_tokens
        dead = False
        try:
            while waiting or open_choices:
                with uninterrupted():
                    tokens = 0  # what fills a step; the rest comes while the GPU is at work
                    while waiting and len(open_choices) < most and tokens < step_tokens:
                        choice = waiting.pop()
                        tokens += len(choice.request.prompt_ids)
                        open_choices[choice.request.request_id] = choice
                        _raise_first(core.add([choice.request]))
                    output, failures = core.step()
                    _raise_first(failures)
                    if output is None:
                        continue
                    ended = self._apply(output, open_choices)
                yield ended
        except EngineDead:  # no step will end any more
            dead = True
            raise
        finally:
            with uninterrupted():
                core.abort(list(open_choices))
                while core.has_work and not dead:
                    core.step()

    def _apply(self, output: StepOutput, open_choices: dict[int, _Choice]) -> list[_Choice]:
        """Hand a step's output to its choices; those that ended."""
        logprobs = output.logprobs or itertools.repeat(None)
        ended = []
        for request_id, token_id, logprob in zip(
            output.request_ids, output.token_ids, logprobs, strict=False
        ):
            if (choice := open_choices.get(request_id)) is not None:
                choice.add(token_id, logprob)
        for request_id, _, scores in output.prompt_logprobs:
            if (choice := open_choices.get(request_id)) is not None:
                choice.prompt_logprobs.extend(scores)
        for finished in output.finished:
            if (choice := open_choices.pop(finished.request_id, None)) is not None:
                choice.finish(finished)
                ended.append(choice)
        stopped = [i for i, choice in open_choices.items() if choice.finish_reason is not None]
        for request_id in stopped:
            ended.append(open_choices.pop(request_id))
            ended[-1].finish(None)
        self.engine.core.abort(stopped)
        return ended


def _raise_first(failures: Sequence[Any]) -> None:
    if failures:
        error = InvalidRequest if failures[0].status < 500 else FullgraphError
        raise error(failures[0].message)


def _most_tokens(params: SamplingParams) -> float:
    """Infinite where nothing is said; what is no number is refused later, by name."""
    return params.max_tokens if isinstance(params.max_tokens, int) else math.inf


_NO_COLLECTIONS = (str, bytes, bytearray, memoryview, type, Mapping)


def _as_prompts(prompts: object) -> list[object]:
    """One prompt or several, as several; no prompt is none. None of them is looked into yet."""
    if isinstance(prompts, str) or not _is_collection(prompts):
        return [prompts]
    several = list(prompts)
    try:
        operator.index(several[0])
    except (IndexError, TypeError):
        return several
    return [several]


def _is_collection(value: object) -> TypeGuard[Iterable[Any]]:
    scalar = getattr(value, "ndim", 1) == 0  # numpy's and torch's
    return isinstance(value, Iterable) and not (scalar or isinstance(value, _NO_COLLECTIONS))


def _has_tokenizer(config: EngineConfig) -> bool:
    """Random weights need none; where none lies beside config.json, ids are the interface."""
    if config.model.load != "random" or config.model.tokenizer is not None:
        return True
    return any(Path(config.model.path).glob("tokenizer*.json"))
