"""The engine in the user's process: what comes back in which order."""

from __future__ import annotations

import os
import signal
from typing import Any

import numpy as np
import pytest
import torch

from engine import LLM, InvalidRequest, SamplingParams
from engine.llm import TextDelta
from tests.conftest import ROOT

TINY = ROOT / "configs" / "tiny_random.yaml"


def test_longest_answers_begin_first_and_come_back_in_order() -> None:
    lengths = [2, 9, 5, 9]
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in lengths]
    prompts = [[10 + i] for i in range(len(lengths))]
    with LLM(TINY, ["scheduler.max_running=1", "log.progress=none"]) as llm:
        outputs = llm.generate(prompts, params, progress=False)
    assert [list(output.prompt_ids) for output in outputs] == prompts
    assert [len(output.token_ids) for output in outputs] == lengths
    first = [output.first_token_s for output in outputs]
    assert sorted(range(len(lengths)), key=first.__getitem__) == [1, 3, 2, 0]
    last = [output.total_s for output in outputs]  # one after the other: there is one slot
    assert last[1] < first[3] < last[3] < first[2] < last[2] < first[0] < last[0]


def test_prompts_come_in_any_collection() -> None:
    params = SamplingParams(max_tokens=1)
    collections: list[Any] = [
        [[1, 2], [3]],
        ((1, 2), (3,)),
        (ids for ids in ([1, 2], [3])),
        [np.array([1, 2]), np.array([3])],
        [[np.int64(1), 2], range(3, 4)],
    ]
    with LLM(TINY, ["log.progress=none"]) as llm:
        for prompts in collections:
            outputs = llm.generate(prompts, params, progress=False)
            assert [output.prompt_ids for output in outputs] == [(1, 2), (3,)]
        for one in ([1, 2], np.array([1, 2]), iter([1, 2])):
            (output,) = llm.generate(one, params, progress=False)  # type: ignore[arg-type]
            assert output.prompt_ids == (1, 2)
        with pytest.raises(InvalidRequest, match="prompt: got -1, allowed: token ids from 0 to"):
            llm.generate([[1], [2, -1, -2]], params, progress=False)


def test_ctrl_c_within_a_step_ends_the_call_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A shell's background job starts with SIGINT ignored, and Python leaves it so.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    with LLM(TINY, ["log.progress=none"]) as llm:
        (expected,) = llm.generate([5, 6, 7], params, progress=False)
        launch, launched = llm.engine.worker.launch, []

        def interrupted(batch: Any) -> Any:
            pending = launch(batch)
            launched.append(batch)
            if len(launched) == 4:
                os.kill(os.getpid(), signal.SIGINT)
            return pending

        monkeypatch.setattr(llm.engine.worker, "launch", interrupted)
        pieces: list[TextDelta] = []
        with pytest.raises(KeyboardInterrupt):
            pieces.extend(llm.stream([5, 6, 7], params))
        assert not llm.engine.core.has_work
        assert llm.engine.core.stats(check=True).integrity == ""
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ids = [i for piece in pieces for i in piece.token_ids]
        assert len(launched) < 10 and ids == list(expected.token_ids[: len(ids)])
        (again,) = llm.generate([5, 6, 7], params, progress=False)
    assert again.token_ids == expected.token_ids


def test_what_is_no_prompt_is_refused_by_name() -> None:
    with LLM(TINY, ["log.progress=none"]) as llm:
        scalar = np.array(3)
        lists = ([[1, "a"]], [{"prompt": "x"}], [1.5], [True], [[1, False]], {"a": 1})
        arrays = (scalar, np.array([True]), torch.tensor([True]), [torch.tensor(True)])
        for wrong in (5, None, *lists, *arrays, b"text", bytearray(b"text"), memoryview(b"text")):
            with pytest.raises(InvalidRequest, match="prompt: got .*, allowed: .*token ids"):
                llm.generate(wrong, progress=False)  # type: ignore[arg-type]
        empties: list[Any] = ["", ["a", ""], [[]], np.array([[]], dtype=int)]
        for empty in empties:
            with pytest.raises(InvalidRequest, match="prompt: it is empty"):
                llm.generate(empty, progress=False)
        with pytest.raises(InvalidRequest, match="max_tokens"):
            llm.generate([1], SamplingParams(max_tokens="5"))  # type: ignore[arg-type]
        assert llm.generate([], progress=False) == []
        several = (SamplingParams(max_tokens=n) for n in (1, 2))
        assert [len(o.token_ids) for o in llm.generate([[1], [2]], several)] == [1, 2]  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest, match="params: allowed"):
            llm.generate([1], SamplingParams)  # type: ignore[arg-type]
        user = {"role": "user", "content": "hi"}
        wrong_messages = ({"role": "foo", "content": "hi"}, {"role": "user"}, {"content": "hi"})
        for no_messages in ([], "hi", ["hi"], None, *([user, wrong] for wrong in wrong_messages)):
            with pytest.raises(InvalidRequest, match="messages") as caught:
                llm.chat(no_messages)  # type: ignore[arg-type]
        assert caught.value.param == "messages.1.role"
        for too_long in (llm.generate, lambda text: llm.chat([{**user, "content": text}])):
            with pytest.raises(InvalidRequest, match="prompt has at least .* tokens") as caught:
                too_long("a" * 10**4)
            assert caught.value.code == "context_length_exceeded"
