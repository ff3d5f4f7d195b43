"""Tokenizers small enough to read: no merges, no files. Ids 0-2 are special, byte b is id b + 3."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from engine.chat_template import ChatTemplate
from engine.tokenizer import Tokenizer

BOS, EOS, PAD = 0, 1, 2
SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ message.role }}:{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_characters() -> list[str]:
    """GPT-2's printable stand-in of each byte, in the bytes' order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def byte_level_backend() -> Backend:
    """A byte-level BPE without merges: one token per byte."""
    tokens = [*SPECIAL_TOKENS, *byte_characters()]
    backend = Backend(BPE({token: index for index, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return backend


def byte_level_tokenizer(*, template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    """The tokenizer of the server's tests, with a chat template that refuses some roles."""
    special = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    return Tokenizer(
        byte_level_backend(),
        eos_ids=frozenset({EOS}),
        special_tokens=special,
        chat_template=ChatTemplate({"default": template}, special) if template else None,
    )
