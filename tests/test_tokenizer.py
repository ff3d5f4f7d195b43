"""Tokenizers from folders and GGUF files, against transformers where it reads the same files."""

from __future__ import annotations

import json
import os
import random
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE, WordLevel

from engine.chat_template import ChatTemplate
from engine.config import ModelOptions
from engine.errors import InvalidRequest, ModelError
from engine.tokenizer import Tokenizer, load_tokenizer
from tests.tiny_tokenizer import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    byte_characters,
    byte_level_backend,
    byte_level_tokenizer,
)

SMOLLM2 = os.environ.get("FULLGRAPH_SMOLLM2_GGUF", "")
needs_smollm2 = pytest.mark.skipif(not SMOLLM2, reason="FULLGRAPH_SMOLLM2_GGUF is not set")
TINY = byte_level_tokenizer()


def write_folder(folder: Path, **files: Any) -> Path:
    """A model folder: tokenizer.json and the given JSON files, by stem."""
    folder.mkdir(exist_ok=True)
    byte_level_backend().save(str(folder / "tokenizer.json"))
    for stem, value in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(value))
    return folder


def load(folder: Path, **options: Any) -> Tokenizer:
    return load_tokenizer(ModelOptions(path=str(folder), **options))


def write_gguf(path: Path, values: dict[str, Any]) -> Path:
    """A GGUF header with strings, integers, booleans and lists of strings or integers."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    def typed(value: Any) -> tuple[int, bytes]:
        if isinstance(value, bool):
            return 7, struct.pack("<?", value)
        if isinstance(value, int):
            return 4, struct.pack("<I", value)
        if isinstance(value, str):
            return 8, text(value)
        items = [typed(item) for item in value]
        head = struct.pack("<IQ", items[0][0], len(items))
        return 9, head + b"".join(data for _, data in items)

    body = b"GGUF" + struct.pack("<IQQ", 3, 0, len(values))
    for key, value in values.items():
        kind, data = typed(value)
        body += text(key) + struct.pack("<I", kind) + data
    path.write_bytes(body)
    return path


def tiny_gguf(path: Path, **changes: Any) -> Path:
    values = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": ["<bos>", "<eos>", "<pad>", *byte_characters(), "ab", "12"],
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * 258],
        "tokenizer.ggml.merges": ["a b", "1 2"],
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
    } | {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
    return write_gguf(path, values)


@given(text=st.text(max_size=50))
@settings(max_examples=100, deadline=None)
def test_round_trip(text: str) -> None:
    assert TINY.decode(TINY.encode(text), skip_special_tokens=False) == text


def merging_backend(*missing: int) -> Backend:
    """Byte-level, of which tokens of up to 4 bytes come; some bytes have no token."""
    lost = {byte_characters()[byte] for byte in missing}
    tokens = [*(c for c in byte_characters() if c not in lost), "aa", "aaaa", "ĠĠ"]
    backend = Backend(BPE({t: i for i, t in enumerate(tokens)}, [("a", "a"), ("aa", "aa")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return backend


def least_and_true(tokenizer: Tokenizer, text: str) -> tuple[int, int]:
    """How many tokens the text is said to have at least, 0 if nothing is said; and how many."""
    said = [0]
    ids = tokenizer.encode(text, add_special_tokens=False, check=said.append)
    return said[-1], len(ids)


_TEXTS = st.lists(
    st.sampled_from(["a", "aaaa", "<|end|>", " ", "1", "\x04", "é", "e\u0301", "\u212b"])
)


@given(text=st.one_of(st.text(max_size=50), _TEXTS.map("".join)))
@settings(max_examples=300, deadline=None)
def test_no_text_has_fewer_tokens_than_it_is_said_to_have(text: str) -> None:
    splits: Any = [pre_tokenizers.Split("a", "isolated"), pre_tokenizers.Digits(True)]
    backends = [merging_backend(), merging_backend(4, 0x31), merging_backend(), merging_backend()]
    backends[2].normalizer = normalizers.NFC()
    backends[3].pre_tokenizer = pre_tokenizers.Sequence([*splits, backends[3].pre_tokenizer])
    for backend in backends:
        least, true = least_and_true(Tokenizer(backend), text)
        assert least <= true
        loses = backend.normalizer is not None or backend.token_to_id("1") is None
        assert loses or least >= len(text.encode()) / 7  # the longest: <|end|>


def sentencepiece_like(backend: Backend) -> None:
    backend.decoder = decoders.Metaspace()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()


def stripping(backend: Backend) -> None:
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])


def removing(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), backend.pre_tokenizer]
    )


def whole_words(backend: Backend) -> None:
    backend.model = WordLevel({"a": 0}, unk_token="a")


@pytest.mark.parametrize(
    "change",
    [
        sentencepiece_like,
        stripping,
        removing,
        whole_words,
        lambda backend: setattr(backend, "normalizer", normalizers.NFKC()),
        lambda backend: setattr(backend, "normalizer", normalizers.Strip()),
    ],
)
def test_nothing_is_said_where_a_text_may_lose_a_part(change: Any) -> None:
    backend = merging_backend()
    assert least_and_true(Tokenizer(backend), "a b" * 99)[0] > 0
    change(backend)
    assert least_and_true(Tokenizer(backend), "a b" * 99)[0] == 0


def test_half_a_surrogate_pair_is_refused_and_the_tokenizer_lives() -> None:
    with pytest.raises(InvalidRequest, match="surrogate") as caught:
        TINY.encode("a\ud83d", param="prompt")
    assert caught.value.param == "prompt"
    with pytest.raises(InvalidRequest, match="surrogate"):
        TINY.encode_chat([{"role": "user", "content": "\ud83d"}])
    assert TINY.decode(TINY.encode("a\0b")) == "a\0b"
    assert TINY.encode("") == []


def test_token_text_and_bytes() -> None:
    assert TINY.token_bytes(ord("a") + 3) == b"a"
    assert TINY.token_text(0xF0 + 3) == "bytes:\\xf0"
    assert TINY.token_bytes(10**9) == TINY.token_bytes(-1) == b""


def test_eos_is_the_union_of_config_generation_config_and_tokenizer(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "m",
        config={"eos_token_id": 7},
        generation_config={"eos_token_id": [8, 9], "temperature": 0.6, "top_k": 20},
        tokenizer_config={"eos_token": {"content": "<eos>"}},
    )
    tokenizer = load(folder)
    assert tokenizer.eos_ids == {7, 8, 9, EOS}
    assert tokenizer.sampling_defaults == {"temperature": 0.6, "top_k": 20}
    assert load(folder, generation_config=False).sampling_defaults == {}


def test_tokenizer_of_another_place_joins_the_models_own_eos_ids(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    other = write_folder(tmp_path / "t", tokenizer_config={"eos_token": "<eos>"})
    assert load(tmp_path / "weights", tokenizer=str(other)).eos_ids == {5, EOS}
    with pytest.raises(ModelError, match="no tokenizer.json"):
        load(tmp_path / "weights")


@pytest.mark.parametrize(("add_bos", "expected"), [(True, [BOS, 68]), (False, [68]), (None, [68])])
def test_add_bos_token(tmp_path: Path, add_bos: bool | None, expected: list[int]) -> None:
    options = {"bos_token": "<bos>"} | ({} if add_bos is None else {"add_bos_token": add_bos})
    tokenizer = load(write_folder(tmp_path / "m", tokenizer_config=options))
    assert tokenizer.encode("A") == expected
    assert tokenizer.encode("A", add_special_tokens=False) == [68]
    assert tokenizer.encode("<bos>A") == [BOS, 68]


def test_chat_template_sources(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    folder = write_folder(tmp_path / "m", tokenizer_config={"chat_template": named})
    template = load(folder).chat_template
    assert template is not None
    message = [{"role": "user", "content": "x"}]
    assert template.render(message) == "D"
    assert template.render(message, tools=[{"type": "function"}]) == "T"
    (folder / "chat_template.jinja").write_text("J")
    template = load(folder).chat_template
    assert template is not None and template.render(message) == "J"
    given_file = tmp_path / "mine.jinja"
    given_file.write_text("M")
    template = load(folder, chat_template=str(given_file)).chat_template
    assert template is not None and template.render(message) == "M"
    with pytest.raises(ModelError, match="chat_template"):
        load(folder, chat_template=str(tmp_path / "missing"))


def test_without_a_template_the_error_says_how_to_give_one() -> None:
    with pytest.raises(InvalidRequest, match="model.chat_template"):
        byte_level_tokenizer(template=None).encode_chat([{"role": "user", "content": "x"}])


def render(source: str, *messages: dict[str, Any], **options: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<bos>"}).render(messages, **options)


def test_template_conventions() -> None:
    user = {"role": "user", "content": "<&'\">"}
    assert render("{{ messages[0] | tojson }}", user) == json.dumps(user)
    assert render("{% for i in [1,2] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}")
    assert render("  {% if true %}\nx\n  {% endif %}\ny", user) == "x\ny"
    assert render("{% generation %}a{{ bos_token }}{% endgeneration %}b", user) == "a<bos>b"
    assert len(render("{{ strftime_now('%Y') }}", user)) == 4
    assert render("{{ thinking }}", user, variables={"thinking": 1}) == "1"
    assert render("{{ 'content' in messages[0] }}", {"role": "a", "content": None}) == "False"
    call = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    said = {"role": "assistant", "tool_calls": [call]}
    assert render("{{ messages[0].tool_calls[0].function.arguments.a }}", said) == "1"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no') }}",
        "{{ messages[0].nothing.at_all }}",
        "{{ 1 + messages }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ cycler.__init__.__globals__ }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_a_template_that_fails_is_the_requests_error(source: str) -> None:
    with pytest.raises(InvalidRequest, match="chat template") as caught:
        render(source, {"role": "user", "content": "x"})
    assert caught.value.param == "messages"


def test_a_broken_template_is_the_models_error() -> None:
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate({"default": "\n{% if %}"}, {})
    with pytest.raises(ModelError, match="none named default"):
        ChatTemplate({"a": "", "b": ""}, {})


def test_roles() -> None:
    template = ChatTemplate({"default": CHAT_TEMPLATE + "{% if 'ipython' %}{% endif %}"}, {})
    assert template.knows_role("user") and template.knows_role("ipython")
    assert not template.knows_role("foo")
    assert template.render([{"role": "developer", "content": "x"}]).startswith("system:x")


def test_continue_the_last_message() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    ids = TINY.encode_chat(messages, continue_final_message=True)
    assert TINY.decode(ids) == "user:hi\nassistant:Well, "


def test_chat_is_tokenised_once_without_a_second_bos() -> None:
    ids = TINY.encode_chat([{"role": "user", "content": "hi"}])
    assert ids == [BOS, *TINY.encode("user:hi\nassistant:")]


TEMPLATES = {
    "chatml": (
        "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- tool | tojson }}"
        "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- for message in messages %}"
        "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
        "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
    ),
    "headers": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}\n  {% set ns.n = ns.n + 1 %}\n"
        "{{ bos_token if loop.first else '' }}[{{ m['role'] | upper }}] {{ m['content'] | trim }}\n"
        "{% if m.role == 'assistant' %}{% generation %}{{ eos_token }}{% endgeneration %}"
        "{% endif %}"
        "{% endfor %}{{ ns.n }}"
    ),
    "tiny": CHAT_TEMPLATE,
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    ours = ChatTemplate({"default": TEMPLATES[name]}, special)
    random_ = random.Random(name)
    tools = [{"type": "function", "function": {"name": "f", "description": "<é>"}}]
    for _ in range(20):
        messages = [
            {"role": role, "content": "".join(random_.choices(" \nab<>é'\"{", k=12))}
            for role in random_.choices(("system", "user", "assistant"), k=4)
        ]
        variants: list[dict[str, Any]] = [{}, {"tools": tools}, {"add_generation_prompt": False}]
        for arguments in variants:
            full = {"add_generation_prompt": True, **arguments}
            theirs, _ = utils.render_jinja_template(
                [messages], chat_template=TEMPLATES[name], **full, **special
            )
            assert ours.render(messages, **full) == theirs[0]


def test_gguf(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "m.gguf", add_bos_token=True, eot_token_id=PAD_ID)
    tokenizer = load(path)
    assert tokenizer.eos_ids == {EOS, PAD_ID}
    assert tokenizer.byte_level and tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.encode("ab12") == [BOS, 259, 260]
    assert tokenizer.encode("ab", add_special_tokens=False) == [259]


PAD_ID = 2


def test_gguf_pre_tokenizers(tmp_path: Path) -> None:
    plain = load(tiny_gguf(tmp_path / "a.gguf"))
    digits = load(tiny_gguf(tmp_path / "b.gguf", pre="smollm"))
    assert plain.encode("12") == [260]
    assert digits.encode("12") == [ord("1") + 3, ord("2") + 3]
    llama = load(tiny_gguf(tmp_path / "c.gguf", pre="llama-bpe"))
    assert llama.encode("ab") == [BOS, 259]
    qwen = load(tiny_gguf(tmp_path / "d.gguf", pre="qwen2"))
    assert qwen.decode(qwen.encode("e\u0301 12")) == "\u00e9 12"


def test_gguf_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"kind 'llama'.*model\.tokenizer"):
        load(tiny_gguf(tmp_path / "a.gguf", model="llama"))
    with pytest.raises(ModelError, match=r"'odd' is not known.*model\.tokenizer"):
        load(tiny_gguf(tmp_path / "b.gguf", pre="odd"))
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load(write_gguf(tmp_path / "c.gguf", {"general.name": "x"}))
    (tmp_path / "d.gguf").write_bytes(b"no such thing as a GGUF file")
    whole = (tmp_path / "a.gguf").read_bytes()
    (tmp_path / "e.gguf").write_bytes(whole[: len(whole) // 2])
    for name in ("d", "e"):
        with pytest.raises(ModelError, match="not a readable GGUF"):
            load(tmp_path / f"{name}.gguf")


def test_mistakes_in_a_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "m", generation_config={"temperature": "hot"})
    with pytest.raises(ModelError, match="temperature is 'hot'"):
        load(folder)
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match="generation_config.json: cannot be read"):
        load(folder)
    (folder / "generation_config.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        load(folder)


@needs_smollm2
def test_smollm2_ids_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    from tokenizers import pre_tokenizers

    path = Path(SMOLLM2)
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    begin = time.perf_counter()
    ours = load_tokenizer(ModelOptions(path=str(path)))
    assert time.perf_counter() - begin < 3, "0.5 s on a quiet machine"
    lines = [
        line
        for file in Path(__file__).parent.glob("test_*tokenizer.py")
        for line in (file.read_text(), *file.read_text().splitlines())
    ]
    lines += [
        "你好，世界",
        "\U0001f469\u200d\U0001f467 é\u0301",
        "<|im_start|>user\nx<|im_end|>",
        "\t\r\n",
    ]
    # transformers' GGUF reader drops the model's own rule that digits stand alone.
    byte_level = theirs.backend_tokenizer.pre_tokenizer
    for line in lines:
        if not any(character.isdigit() for character in line):
            assert ours.encode(line) == theirs(line)["input_ids"], line
    theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), byte_level]
    )
    for line in lines:
        assert ours.encode(line) == theirs(line)["input_ids"], line
        assert ours.decode(ours.encode(line), skip_special_tokens=False) == line
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    chat = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(messages) == chat
    assert ours.eos_ids == {theirs.eos_token_id}
    assert set(theirs.all_special_ids) <= ours.special_ids == frozenset(range(17))


@pytest.mark.parametrize("module", ["engine.tokenizer", "engine.detokenizer", "engine.model_files"])
def test_no_torch(module: str) -> None:
    code = (
        f"import sys, {module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
