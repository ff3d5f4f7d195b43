"""Grammars that answers follow: which ids may come next, computed beside the steps.

    start(grammar) -> a thread reads the vocabulary (once) and the grammar -> a guide
    draw -> guide.advance(id) -> threads find what may follow, of all guides -> guide.mask()

llguidance does the work and releases the GIL in it, but for reading the vocabulary (0.3 s for
50,000 tokens, at the first request that asks). Knows nothing of steps, slots or requests.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from engine.errors import InvalidRequest
from engine.machine import physical_cores
from engine.scheduler.batch import I32
from engine.structured_outputs import in_deep_thread
from engine.tokenizer import Tokenizer

_MOST_READERS = 4
# A mask takes 0.02 to 0.5 ms; one that meets a part of its grammar for the first time up to 10.
_MOST_LOOKERS = 16
# What llguidance says, and what its user can do about it.
_HINTS = {
    "NoExtension": "no text fits it",
    "Current row has": "it allows too much in one place (make optional properties required)",
    "lexer": "a regular expression in it is too large",
}


_Job = tuple[str, "Future[TokenGuide]"]


class Grammars:
    """Makes guides, and finds out together what may follow for all that went on.

    Args:
        load: reads the model's tokenizer, one of its own; called once, in a thread.
        vocab_size: of the model, V.

    Attributes:
        num_words: ceil(V / 32), of a mask.
    """

    def __init__(self, load: Callable[[], Tokenizer], vocab_size: int) -> None:
        self._load, self._vocab_size = load, vocab_size
        self.num_words = -(-vocab_size // 32)
        self._vocabulary: Any = None
        self._executor: Any = None
        self._lock = threading.Lock()
        self._to_read: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._num_readers = 0
        self._looker = ThreadPoolExecutor(1, thread_name_prefix="mask")
        self._moved: list[TokenGuide] = []

    def start(self, grammar: str) -> Future[TokenGuide]:
        """A guide at the grammar's beginning.

        Raises (the future):
            InvalidRequest: the grammar does not fit the model's tokens.
            ModelError: the model's tokenizer cannot be read.
        """
        future: Future[TokenGuide] = Future()
        self._to_read.put((grammar, future))
        if self._num_readers < _MOST_READERS:
            self._num_readers += 1
            in_deep_thread(self._read)
        return future

    def close(self) -> None:
        """No guide is made or asked any more."""
        with contextlib.suppress(queue.Empty):
            while (job := self._to_read.get_nowait()) is not None:
                job[1].cancel()
        for _ in range(self._num_readers):
            self._to_read.put(None)
        self._looker.shutdown(wait=False, cancel_futures=True)

    def _read(self) -> None:
        while (job := self._to_read.get()) is not None:
            grammar, future = job
            try:
                future.set_result(self._begin(grammar))
            except BaseException as error:  # a panic of Rust's is no Exception
                future.set_exception(error)

    def _begin(self, grammar: str) -> TokenGuide:
        from llguidance import LLExecutor, LLMatcher

        with self._lock:
            if self._vocabulary is None:
                self._executor = LLExecutor(max(1, min(_MOST_LOOKERS, physical_cores() - 1)))
                self._vocabulary = _read(self._load(), self._vocab_size)
        guide = TokenGuide(LLMatcher(self._vocabulary, grammar, log_level=0), self)
        self._look([guide])
        if guide.error:
            raise InvalidRequest.of("structured_outputs", guide.error)
        return guide

    def moved(self, guide: TokenGuide) -> None:
        """The guide has gone on: what may follow is to be found out."""
        self._moved.append(guide)

    def look(self) -> None:
        """Begin to find it out, for all guides that have gone on."""
        if self._moved:
            guides, self._moved = self._moved, []
            pending = self._looker.submit(self._look, guides)
            for guide in guides:
                guide.pending = pending

    def _look(self, guides: Sequence[TokenGuide]) -> None:
        from llguidance.numpy import fill_next_token_bitmask_par

        masks = np.full((len(guides), self.num_words), -1, np.int32)
        sound = [(guide.matcher, i) for i, guide in enumerate(guides) if not guide.error]
        try:
            fill_next_token_bitmask_par(self._executor, sound, masks)
        except BaseException as error:  # a panic of Rust's is no Exception
            for guide in guides:
                guide.fail(f"llguidance failed: {error}")
            return
        for guide, mask in zip(guides, masks, strict=True):
            guide.set_mask(mask)


class TokenGuide:
    """One answer's place in its grammar; engine.scheduler.slots.Guide.

    Args:
        matcher: of llguidance, at its beginning.
        grammars: finds out what may follow.
    """

    def __init__(self, matcher: Any, grammars: Grammars) -> None:
        self.matcher, self._grammars = matcher, grammars
        self.pending: Future[None] | None = None
        self.error = ""
        self._mask = np.zeros(0, np.int32)

    def wait(self, seconds: float) -> bool:
        """Whether `mask` would not wait, after so many seconds at most."""
        self._grammars.look()
        if self.pending is None or self.pending.done():
            return True
        return bool(wait([self.pending], seconds).done)

    def mask(self) -> I32:
        """What may come next: int32 [ceil(V / 32)], as SlotMask has it."""
        self._grammars.look()
        if self.pending is not None:
            self.pending.result()
        return self._mask

    def set_mask(self, mask: I32) -> None:
        """What may come next, as it was found; with an error of the matcher's, anything: the
        request ends with what is drawn.
        """
        self._mask = mask
        self.fail(self.matcher.get_error())

    def fail(self, error: str) -> None:
        """What is wrong, beyond llguidance's limits, say; nothing if it is empty."""
        if error:
            error = error.partition("\n")[0]  # its state and the grammar follow
            hints = (hint for words, hint in _HINTS.items() if words in error)
            self.error = next((f"{hint} ({error:.200})" for hint in hints), error)
            self._mask = np.full(self._grammars.num_words, -1, np.int32)

    def advance(self, token_id: int) -> bool:
        """Go on by the id that was drawn.

        Returns:
            Whether the grammar is at its end. False, too, where `error` says what is wrong.
        """
        if not self.error and not self.matcher.consume_token(token_id):
            self.fail(self.matcher.get_error())
        if self.error or self.matcher.is_stopped():
            return not self.error
        self._grammars.moved(self)
        return False


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
