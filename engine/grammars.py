"""Grammars that answers follow: which ids may come next, computed beside the steps.

    start(grammar) -> a thread reads the vocabulary (once) and the grammar -> a guide
    draw -> guide.advance(id) -> a thread finds what may follow -> guide.mask()

llguidance does the work and releases the GIL in it, but for reading the vocabulary (0.3 s for
50,000 tokens, at the first request that asks). Knows nothing of steps, slots or requests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from engine.errors import InvalidRequest
from engine.scheduler.batch import I32
from engine.structured_outputs import with_deep_stack
from engine.tokenizer import Tokenizer

# A mask takes 0.02 to 0.5 ms; one that meets a part of its grammar for the first time up to 10.
_NUM_THREADS = 4


class Grammars:
    """Makes guides.

    Args:
        load: reads the model's tokenizer, one of its own; called once, in a thread.
        vocab_size: of the model, V.
    """

    def __init__(self, load: Callable[[], Tokenizer], vocab_size: int) -> None:
        self._load, self._vocab_size = load, vocab_size
        self._vocabulary: Any = None
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")

    def start(self, grammar: str) -> Future[TokenGuide]:
        """A guide at the grammar's beginning, that knows what may come first.

        Raises (the future):
            InvalidRequest: the grammar does not fit the model's tokens.
            ModelError: the model's tokenizer cannot be read.
        """
        return self._threads.submit(self._begin, grammar)

    def close(self) -> None:
        """No guide is made or asked any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, grammar: str) -> TokenGuide:
        from llguidance import LLMatcher

        with self._lock:
            if self._vocabulary is None:
                self._vocabulary = _read(self._load(), self._vocab_size)
        matcher = with_deep_stack(lambda: LLMatcher(self._vocabulary, grammar, log_level=0))
        guide = TokenGuide(matcher, self._vocab_size, self._threads)
        if guide.error:
            raise InvalidRequest.of("structured_outputs", guide.error)
        return guide


class TokenGuide:
    """One answer's place in its grammar; engine.scheduler.slots.Guide.

    Args:
        matcher: of llguidance, at its beginning.
        vocab_size: V.
        threads: where masks are computed.
    """

    def __init__(self, matcher: Any, vocab_size: int, threads: ThreadPoolExecutor) -> None:
        self._matcher, self._threads = matcher, threads
        self._mask = np.zeros((1, -(-vocab_size // 32)), np.int32)
        self._pending: Future[None] | None = None
        self.error = ""
        self._look()

    @property
    def is_ready(self) -> bool:
        """Whether `mask` would not wait."""
        return self._pending is None or self._pending.done()

    def mask(self) -> I32:
        """What may come next: int32 [ceil(V / 32)], as SlotMask has it; overwritten
        after the next `advance`.
        """
        if self._pending is not None:
            self._pending.result()
        (mask,) = self._mask
        return mask

    def advance(self, token_id: int) -> bool:
        """Go on by the id that was drawn.

        Returns:
            Whether the grammar is at its end. False, too, where `error` says what is wrong.
        """
        if not self.error and not self._matcher.consume_token(token_id):
            self.error = self._matcher.get_error().partition("\n")[0]
        if self.error or self._matcher.is_stopped():
            return not self.error
        self._pending = self._threads.submit(self._look)
        return False

    def _look(self) -> None:
        from llguidance.numpy import fill_next_token_bitmask

        if not self._matcher.is_error():
            fill_next_token_bitmask(self._matcher, self._mask)
        # Beyond llguidance's limits, say; its state and the grammar follow in further lines.
        self.error = self._matcher.get_error().partition("\n")[0]
        if self.error:
            self._mask.fill(-1)


def _read(tokenizer: Tokenizer, vocab_size: int) -> Any:
    """llguidance's own form of a vocabulary."""
    from llguidance import LLTokenizer, TokenizerWrapper

    eos_ids = sorted(token_id for token_id in tokenizer.eos_ids if token_id < vocab_size)
    wrapper = TokenizerWrapper(_Vocabulary(tokenizer, vocab_size, eos_ids[0]))
    # Without slices: they halve the time of some masks, and take three times as long to make.
    return LLTokenizer(wrapper, n_vocab=vocab_size, eos_token=eos_ids, slices=[])


class _Vocabulary:
    """What TokenizerWrapper asks for; ids whose token has no bytes never come."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_id: int) -> None:
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_ids if i < vocab_size)
        self.eos_token_id = eos_id
        self._tokenizer = tokenizer
        # What a grammar has written out is text, "<eos>" too.
        tokenizer.backend.encode_special_tokens = True

    def __call__(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)
