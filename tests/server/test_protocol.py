"""Bodies to Jobs: defaults, limits, seeds and indices, without a server."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import InvalidRequest, NotFound, RequestError
from engine.messages import template_messages, template_tools
from engine.request import EngineRequest, Ready
from engine.server.protocol import Context, Job, chat_job, completion_job
from engine.tokenizer import Tokenizer
from tests.server.fake_engine import VOCAB_SIZE
from tests.server.servers import config_of
from tests.tiny_tokenizer import BOS, EOS, byte_level_backend, byte_level_tokenizer

TOKENIZER = byte_level_tokenizer()


def context(tokenizer: Tokenizer = TOKENIZER, **changes: Any) -> Context:
    ready = Ready(
        max_model_len=64, vocab_size=VOCAB_SIZE, num_pages=100, page_size=4, max_running=8
    )
    return Context(config_of(**changes), ready, tokenizer)


def completion(context_: Context | None = None, **body: Any) -> Job:
    body = {"prompt": "abc", **body}
    return completion_job(json.dumps(body).encode(), context_ or context())


def chat(context_: Context | None = None, **body: Any) -> Job:
    body = {"messages": [{"role": "user", "content": "hi"}], **body}
    return chat_job(json.dumps(body).encode(), context_ or context())


def only(job: Job) -> EngineRequest:
    (request,) = job.requests
    return request


def test_defaults_are_openais() -> None:
    request = only(completion())
    assert request.prompt_ids == TOKENIZER.encode("abc")
    assert (request.max_tokens, request.temperature, request.top_p) == (16, 1.0, 1.0)
    assert (request.top_k, request.min_p, request.repetition_penalty) == (0, 0.0, 1.0)
    assert (request.logprobs, request.prompt_logprobs, request.priority) == (-1, -1, 0)
    assert request.stop_ids == [EOS] and request.logit_bias == {}
    job = completion()
    assert not job.stream and not job.echo
    assert job.params.n == 1 and job.params.logprobs is None and job.params.skip_special_tokens


def test_chat_generates_to_the_contexts_end() -> None:
    job = chat()
    request = only(job)
    assert request.prompt_ids == [BOS, *TOKENIZER.encode("user:hi\nassistant:")]
    assert len(request.prompt_ids) + request.max_tokens == 64
    assert only(chat(max_tokens=3)).max_tokens == 3
    assert only(chat(max_tokens=3, max_completion_tokens=5)).max_tokens == 5


def test_null_is_the_same_as_leaving_out() -> None:
    fields = [
        "max_tokens", "temperature", "top_p", "n", "stop", "stream", "stream_options", "seed",
        "logprobs", "echo", "logit_bias", "presence_penalty", "frequency_penalty", "best_of",
        "suffix", "user", "top_k", "min_p", "repetition_penalty", "min_tokens", "stop_token_ids",
        "ignore_eos", "skip_special_tokens", "priority", "response_format", "model",
    ]  # fmt: skip
    job = completion(**dict.fromkeys(fields))
    assert only(job).max_tokens == 16 and job.params.n == 1


def test_the_authors_sampling_defaults_are_taken_and_overridden() -> None:
    tokenizer = Tokenizer(
        byte_level_backend(),
        sampling_defaults={"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1},
    )
    request = only(completion(context(tokenizer)))
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (
        0.6, 20, 0.95, 0.1,
    )  # fmt: skip
    request = only(completion(context(tokenizer), temperature=0, top_k=-1, top_p=1, min_p=0))
    assert (request.temperature, request.top_k, request.top_p, request.min_p) == (0, 0, 1, 0)


def test_indices_and_seeds() -> None:
    job = completion(prompt=["a", "bc"], n=3, seed=2**64 - 2)
    ids = [TOKENIZER.encode("a")] * 3 + [TOKENIZER.encode("bc")] * 3
    assert [request.prompt_ids for request in job.requests] == ids
    assert [request.seed for request in job.requests] == [2**64 - 2, 2**64 - 1, 0, 1, 2, 3]
    assert (job.num_choices, job.num_prompt_tokens) == (6, 3)
    assert only(completion(seed=-1)).seed == 2**64 - 1
    drawn = {only(completion()).seed for _ in range(5)}
    assert len(drawn) == 5 and all(0 <= seed < 2**64 for seed in drawn)


def test_prompt_shapes() -> None:
    for prompt, expected in (
        ("abc", [[100, 101, 102]]),
        (["abc", "a"], [[100, 101, 102], [100]]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ):
        assert [p.token_ids for p in completion(prompt=prompt).prompts] == expected


@pytest.mark.parametrize(
    ("body", "max_tokens"),
    [
        ({"prompt": [5] * 60}, 4),
        ({"prompt": [5] * 63, "max_tokens": 9}, 1),
        ({"prompt": [5] * 10, "max_tokens": 10**30}, 54),
    ],
)
def test_max_tokens_is_clamped_to_the_context(body: dict[str, Any], max_tokens: int) -> None:
    assert only(completion(**body)).max_tokens == max_tokens


def test_a_small_pool_clamps_and_refuses() -> None:
    ready = Ready(max_model_len=64, vocab_size=VOCAB_SIZE, num_pages=5, page_size=4, max_running=8)
    small = Context(config_of(), ready, TOKENIZER)
    assert only(completion(small, prompt=[5] * 10, max_tokens=50)).max_tokens == 10
    assert only(completion(small, prompt=[5] * 19, max_tokens=50)).max_tokens == 1
    with pytest.raises(InvalidRequest, match=r"20 tokens.*KV cache holds 20 tokens"):
        completion(small, prompt=[5] * 20)
    with pytest.raises(InvalidRequest, match=r"65 tokens.*64"):
        completion(prompt=[5] * 65)


def test_a_text_that_cannot_fit_is_not_tokenised() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.backend = SimpleNamespace(normalizer=None)  # type: ignore[assignment]
    long, words = "a" * 999, r"has at least \d+ tokens and this model's context is 64 tokens"
    with pytest.raises(InvalidRequest, match=words) as caught:
        completion(context(tokenizer), prompt=[long, "b"])
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(InvalidRequest, match=words) as caught:
        chat(context(tokenizer), messages=[{"role": "user", "content": long}])
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(InvalidRequest, match="the prompt has 70 tokens .* at least 1 must be left"):
        completion(prompt="a" * 70)  # the longest token has 5 bytes


def test_echo_and_scores() -> None:
    scored = completion(echo=True, logprobs=2, max_tokens=0, prompt=[5] * 64)
    assert (only(scored).max_tokens, only(scored).prompt_logprobs) == (0, 2)
    assert completion(echo=True, max_tokens=0).requests == []
    both = only(completion(echo=True, logprobs=0, max_tokens=3))
    assert (both.logprobs, both.prompt_logprobs) == (0, 0)
    assert only(completion(logprobs=3)).prompt_logprobs == -1
    with pytest.raises(InvalidRequest, match="max_tokens: got 0"):
        completion(max_tokens=0, logprobs=1)


def test_chat_logprobs() -> None:
    assert only(chat(logprobs=True)).logprobs == 0
    assert only(chat(logprobs=True, top_logprobs=4)).logprobs == 4
    assert only(chat(logprobs=False)).logprobs == -1
    wrong: list[dict[str, Any]] = [
        {"top_logprobs": 4},
        {"logprobs": 5},
        {"logprobs": True, "top_logprobs": 21},
    ]
    for body in wrong:
        with pytest.raises(InvalidRequest, match="logprobs"):
            chat(**body)


def test_stop_ids_are_the_models_and_the_requests() -> None:
    several = Tokenizer(byte_level_backend(), eos_ids=frozenset({1, 7, 10**6}))
    assert only(completion(context(several))).stop_ids == [1, 7]
    assert only(completion(context(several), stop_token_ids=[9, 7])).stop_ids == [1, 7, 9]
    assert only(completion(context(several), ignore_eos=True)).stop_ids == []
    small = context(several, **{"sampling.max_stop_ids": 3})
    with pytest.raises(InvalidRequest, match="got 4, allowed: at most 3"):
        completion(small, stop_token_ids=[9, 10])
    with pytest.raises(InvalidRequest, match="got 4, allowed: at most 3"):
        completion(small, stop_token_ids=[9, 10, 11, 12], ignore_eos=True)


@pytest.mark.parametrize(
    ("changes", "body", "words"),
    [
        ({"server.max_n": 2}, {"n": 3}, "n: got 3, allowed: from 1 to 2"),
        ({"server.max_prompts": 2}, {"prompt": ["a"] * 3}, "3 prompts, allowed: at most 2"),
        ({"server.max_stop": 2}, {"stop": ["a", "b", "c"]}, "3 strings, allowed: at most 2"),
        ({"server.max_stop_length": 2}, {"stop": "abc"}, "3 characters, allowed: at most 2"),
        ({"sampling.max_logprobs": 2}, {"logprobs": 3}, "got 3, allowed: from 0 to 2"),
        (
            {"sampling.max_logit_bias": 1},
            {"logit_bias": {"1": 1, "2": 2}},
            "2 entries, allowed: at most 1",
        ),
    ],
)
def test_caps_come_from_the_configuration(
    changes: dict[str, Any], body: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest, match=words):
        completion(context(**changes), **body)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("suffix", "x"),
        ("best_of", 2),
        ("truncate_prompt_tokens", 0),
        ("response_format", "json"),
        ("use_beam_search", True),
        ("prompt_logprobs", 1),
        ("include_stop_str_in_output", True),
        ("modalities", ["audio"]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_what_we_cannot_do_is_refused_by_name(name: str, value: Any) -> None:
    body: dict[str, Any] = {name: value}
    with pytest.raises(InvalidRequest, match=name.split("_")[0]) as caught:
        completion(**body)
    assert caught.value.param == name
    if name not in ("suffix", "best_of"):
        with pytest.raises(InvalidRequest):
            chat(**body)


def test_what_means_nothing_here_is_ignored() -> None:
    extras: dict[str, Any] = {
        "store": True,
        "metadata": {},
        "service_tier": "auto",
        "parallel_tool_calls": True,
    }
    chat(**extras, response_format={"type": "text"}, tool_choice="auto", user="me", new_field=1)
    completion(best_of=1, response_format={"type": "text"}, suffix=None, use_beam_search=False)
    assert completion(n=2, best_of=2).params.n == 2


def test_the_model_is_checked_before_anything_else_of_the_request() -> None:
    with pytest.raises(NotFound, match="'other' does not exist; this server has 'tiny'"):
        completion(model="other", n=10**9)
    assert completion(model="tiny").model == "tiny"
    changes: dict[str, Any] = {"model.served_name": "mine"}
    named = context(**changes)
    assert completion(named, model="mine").model == "mine"


def test_min_tokens_must_fit_max_tokens() -> None:
    assert only(completion(min_tokens=4, max_tokens=4)).min_tokens == 4
    with pytest.raises(InvalidRequest, match="min_tokens: got 5, allowed: at most max_tokens"):
        completion(min_tokens=5, max_tokens=4)


def test_logit_bias_keys() -> None:
    assert only(completion(logit_bias={"5": -100, "6": 0.5})).logit_bias == {5: -100, 6: 0.5}
    for key in ("٣", "1_0", " 5", "+5", "", "0x5", "9" * 5000):
        with pytest.raises(InvalidRequest, match="logit_bias"):
            completion(logit_bias={key: 1})


def test_messages() -> None:
    parts = [{"type": "text", "text": "a"}, "b", {"type": "refusal", "refusal": "c"}]
    assert template_messages([{"role": "user", "content": parts}], lambda _: True) == [
        {"role": "user", "content": "a\nb\nc"}
    ]
    calls = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert template_messages([calls], lambda _: True) == [{**calls, "content": ""}]
    bad: list[tuple[dict[str, Any], str]] = [
        ({"role": "foo", "content": "x"}, "messages.0.role"),
        ({"role": ["user"], "content": "x"}, "messages.0.role"),
        ({"role": "user", "content": None}, "messages.0.content"),
        ({"role": "assistant"}, "messages.0.content"),
        ({"role": "user", "content": 5}, "messages.0.content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content.0"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages.0.content.0"),
        ({"role": "user", "content": [None]}, "messages.0.content.0"),
    ]
    for message, param in bad:
        with pytest.raises(InvalidRequest) as caught:
            template_messages([message], lambda role: role in ("user", "assistant"))
        assert caught.value.param == param


def test_tools() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert template_tools([tool], None, None) == [tool]
    assert template_tools(None, [{"name": "f"}], "auto") == [tool]
    assert template_tools([tool], None, "none") is None
    assert template_tools(None, None, None) is None
    for wrong in ({}, {"type": "function"}, {"type": "x", "function": {"name": "f"}}):
        with pytest.raises(InvalidRequest, match="tools.0"):
            template_tools([wrong], None, None)


def test_template_options_reach_the_template() -> None:
    tokenizer = byte_level_tokenizer(
        template="{{ tools | length if tools else 0 }}{{ mood }}{{ add_generation_prompt }}"
    )
    tool = {"type": "function", "function": {"name": "f"}}
    job = chat(
        context(tokenizer),
        tools=[tool],
        chat_template_kwargs={"mood": "!"},
        add_generation_prompt=False,
    )
    assert tokenizer.decode(only(job).prompt_ids) == "1!False"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from(
    [
        "prompt", "messages", "model", "n", "max_tokens", "temperature", "stop", "logit_bias",
        "seed", "logprobs", "top_logprobs", "stream", "stream_options", "echo", "best_of",
        "stop_token_ids", "tools", "functions", "response_format", "min_tokens", "top_k",
        "chat_template_kwargs", "continue_final_message", "tool_choice", "modalities",
        "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    ]
)  # fmt: skip


@given(body=st.dictionaries(NAMES, JSON, max_size=6), sane=st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_json_gives_a_job_or_a_request_error(body: dict[str, Any], sane: bool) -> None:
    """Never another exception, and every request that comes out is one the engine can run."""
    if sane:
        message = {"role": "user", "content": "x"}
        body = {"prompt": "x", "messages": [message], **body, "model": "tiny"}
    for parse in (completion_job, chat_job):
        try:
            job = parse(json.dumps(body).encode(), context())
        except RequestError as error:
            assert error.status in (400, 404) and error.message
            continue
        for request in job.requests:
            assert request.prompt_ids and len(request.prompt_ids) + request.max_tokens <= 64
            assert 0 <= request.seed < 2**64 and request.temperature >= 0


@given(body=st.binary(max_size=30))
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_a_request_error(body: bytes) -> None:
    with pytest.raises(RequestError):
        completion_job(body, context())
