"""A `tokenizers.Tokenizer` out of a GGUF file's metadata: byte-level BPE vocabularies.

The pre-tokenizers are those of the models' own tokenizer.json, found by the name in
`tokenizer.ggml.pre`. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from engine.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # values in tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTIONS + (
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _WORDS % "{1,3}"
_QWEN2 = _WORDS % ""

_PLAIN = ("default", "gpt-2", "gpt2", "olmo")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")
_SPLITS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}
# These put a BOS before every text even where the file has no add_bos_token.
_BOS_BY_DEFAULT = ("llama-bpe", "llama3", "llama-v3")


def build_gguf_tokenizer(metadata: Mapping[str, Any], source: str) -> Tokenizer:
    """Build the tokenizer.

    Args:
        metadata: of the file's header.
        source: what error messages call the file.

    Raises:
        ModelError: another kind of vocabulary, or a pre-tokenizer that is not known here.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{source}: a tokenizer of kind {kind!r} cannot be read from GGUF (only byte-level "
            "BPE can); set model.tokenizer to a folder or hub id that has a tokenizer.json"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(line.split(" ", 1)) for line in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre in _BOS_BY_DEFAULT))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, source)
    tokenizer.decoder = decoders.ByteLevel()
    if _SPLITS.get(pre) is _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    _add_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", ()))
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token", pre in _BOS_BY_DEFAULT) and bos is not None:
        tokenizer.post_processor = TemplateProcessing(
            single=f"{tokens[bos]}:0 $A:0", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [
            AddedToken(token, special=special, normalized=False)
            for token, token_kind in zip(tokens, kinds, strict=False)
            if token_kind == kind
        ]
        if special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)


def _pre_tokenizer(pre: str, source: str) -> pre_tokenizers.PreTokenizer:
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre in _PLAIN:
        return byte_level
    if pre in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, byte_level])
    if pre not in _SPLITS:
        known = ", ".join(sorted({*_PLAIN, *_DIGITS, *_SPLITS}))
        raise ModelError(
            f"{source}: pre-tokenizer {pre!r} is not known (known: {known}); set model.tokenizer "
            "to a folder or hub id that has a tokenizer.json"
        )
    split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
    encode = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, encode])
