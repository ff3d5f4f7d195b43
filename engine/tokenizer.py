"""Text or messages to token ids, and back.

A thin layer over the `tokenizers` library (which releases the GIL while it works, so that encoding
can go to a thread). Knows nothing of requests, streaming or HTTP, and never imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from engine.chat_template import ChatTemplate, Message
from engine.config import ModelOptions
from engine.errors import InvalidRequest, ModelError
from engine.messages import template_messages
from engine.model_files import TokenizerFiles, read_tokenizer_files

# Printable stand-ins of bytes in byte-level BPE vocabularies (GPT-2): printable Latin-1 characters
# stand for themselves, the other bytes for 256, 257, ... in order.
_PRINTABLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}


class _ByteOfCharacter(dict[int, int]):
    """Translation table from stand-ins to bytes; what is no stand-in becomes unencodable."""

    def __init__(self) -> None:
        others = [byte for byte in range(256) if byte not in _PRINTABLE]
        super().__init__({byte: byte for byte in _PRINTABLE})
        self.update({256 + index: byte for index, byte in enumerate(others)})

    def __missing__(self, key: int) -> int:
        return 0xFFFF


_BYTE_OF_CHARACTER = _ByteOfCharacter()


class Tokenizer:
    """One model's tokenizer.

    Args:
        backend: the tokenizer itself.
        eos_ids: every id that ends a text.
        special_tokens: role ("bos_token", ...) -> text.
        chat_template: None where the model has none.
        add_bos: put a BOS before every text, or never; None leaves it to the backend.
        sampling_defaults: what the model's authors recommend (temperature, top_p, ...).

    Attributes:
        byte_level: each token is a fixed string of bytes (byte-level BPE).
        vocab_size: ids the tokenizer knows are below this; the model may have more.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: frozenset[int] = frozenset(),
        special_tokens: Mapping[str, str] | None = None,
        chat_template: ChatTemplate | None = None,
        add_bos: bool | None = None,
        sampling_defaults: Mapping[str, float] | None = None,
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.eos_ids = eos_ids
        self.chat_template = chat_template
        self.sampling_defaults = dict(sampling_defaults or {})
        self.special_ids = frozenset(
            token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        )
        self._bos = (special_tokens or {}).get("bos_token", "")
        self._bos_id = backend.token_to_id(self._bos) if self._bos else None
        self._add_bos = add_bos if self._bos_id is not None else None
        self.byte_level = _is_byte_level(_kinds(backend.decoder))
        self._bytes = _token_bytes(backend, self.byte_level)
        self.vocab_size = len(self._bytes)
        # Of the longest token, in bytes; 0 where a text may be longer than its tokens together.
        lossless = self.byte_level and _is_lossless(backend)
        self._longest = max(map(len, self._bytes), default=0) if lossless else 0
        find = backend.model.token_to_id
        # Bytes without a token vanish.
        self._lost = bytes(b for c, b in _BYTE_OF_CHARACTER.items() if find(chr(c)) is None)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        param: str = "prompt",
        check: Callable[[int], object] = int,
    ) -> list[int]:
        """Token ids of a text. Special tokens written out in it become their ids.

        Args:
            check: told how many tokens there are at least, before the text is tokenised; it may
                raise.

        Raises:
            InvalidRequest: the text holds half a surrogate pair; names `param`.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise InvalidRequest(
                "the text holds half a surrogate pair, which is no character", param=param
            ) from None
        if self._longest and (self.backend.normalizer is None or text.isascii()):
            check(-(-len(data.translate(None, self._lost)) // self._longest))
        # The fast call leaves out offsets, which nobody here wants, and releases the GIL.
        (encoded,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        if add_special_tokens and self._add_bos is not None:
            has_bos = bool(ids) and ids[0] == self._bos_id
            if self._add_bos and not has_bos and self._bos_id is not None:
                return [self._bos_id, *ids]
            if not self._add_bos and has_bos and not text.startswith(self._bos):
                return ids[1:]
        return ids

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        check: Callable[[int], object] = int,
    ) -> list[int]:
        """Token ids of a conversation: the template's text, tokenised once, nothing put before it.

        `check` is as in encode().

        Raises:
            InvalidRequest: no message, one that is wrong, no template, or it refuses the
                conversation.
        """
        if not messages:
            raise InvalidRequest.of("messages", "at least one message is needed")
        if self.chat_template is None:
            raise InvalidRequest(
                "this model's tokenizer has no chat template; start the server with "
                "model.chat_template set to a Jinja file, or use /v1/completions",
                param="messages",
            )
        text = self.chat_template.render(
            template_messages(messages, self.chat_template.knows_role),
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
        )
        return self.encode(text, add_special_tokens=False, param="messages", check=check)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of some ids, whole. Ids that the tokenizer does not know are nothing."""
        text: str = self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for inside a text; of an id that is not known, none."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def token_text(self, token_id: int) -> str:
        """The token for a person: its text, or `bytes:\\xf0\\x9f` for a part of a character."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _kinds(step: Any) -> set[bytes]:
    """The types in a step of a tokenizer, and how texts are split there; none of None."""
    state = b"" if step is None else step.__getstate__()
    return set(re.findall(rb'"(?:type|behavior)":"(\w+)"', state))


def _is_byte_level(kinds: set[bytes], others: Iterable[bytes] = ()) -> bool:
    return {b"ByteLevel"} <= kinds <= {b"ByteLevel", b"Sequence", *others}


def _is_lossless(backend: Backend) -> bool:
    """ASCII texts (others too, without a normalizer) are what their tokens are together, but for
    bytes without a token of their own.
    """
    model, added = backend.model, backend.get_added_tokens_decoder().values()
    return (
        isinstance(model, BPE)
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
        and _is_byte_level(_kinds(backend.pre_tokenizer), (b"Digits", b"Split", b"Isolated"))
        and _kinds(backend.normalizer) <= {b"Sequence", b"NFC", b"NFD"}
        and all(t.content.isascii() and not (t.lstrip or t.rstrip) for t in added)
    )


def _token_bytes(backend: Backend, byte_level: bool) -> list[bytes]:
    """By id. Outside byte-level BPE: sentencepiece's writing, a low line for a space, <0x0A>."""
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    added = set(backend.get_added_tokens_decoder())
    for token, token_id in vocab.items():
        if byte_level:
            try:
                table[token_id] = token.translate(_BYTE_OF_CHARACTER).encode("latin-1")
            except UnicodeEncodeError:
                table[token_id] = token.encode()
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            table[token_id] = bytes([int(token[3:5], 16)])
        else:
            text = token if token_id in added else token.replace("\u2581", " ")
            table[token_id] = text.encode()
    return table


def load_tokenizer(options: ModelOptions) -> Tokenizer:
    """The tokenizer that a configuration names.

    End-of-sequence ids are the union of config.json, generation_config.json and the tokenizer's
    own, of the model and of `model.tokenizer` where that is another place.

    Raises:
        ModelError: there is none, or it cannot be read.
    """
    files = read_tokenizer_files(options.path, options.revision, offline=options.offline)
    eos_ids, defaults = files.eos_ids, files.sampling_defaults
    if options.tokenizer is not None and options.tokenizer != options.path:
        files = read_tokenizer_files(options.tokenizer, offline=options.offline)
        eos_ids |= files.eos_ids
    if files.backend is None:
        raise ModelError(
            f"{files.source}: no tokenizer.json; set model.tokenizer to a folder or hub id with one"
        )
    eos = files.special_tokens.get("eos_token")
    eos_id = files.backend.token_to_id(eos) if eos is not None else None
    return Tokenizer(
        files.backend,
        eos_ids=eos_ids if eos_id is None else eos_ids | {eos_id},
        special_tokens=files.special_tokens,
        chat_template=_chat_template(options, files),
        add_bos=files.add_bos,
        sampling_defaults=defaults if options.generation_config else {},
    )


def _chat_template(options: ModelOptions, files: TokenizerFiles) -> ChatTemplate | None:
    templates = files.templates
    if options.chat_template is not None:
        try:
            templates = {"default": Path(options.chat_template).read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"model.chat_template: {error}") from None
    return ChatTemplate(templates, files.special_tokens) if templates else None
