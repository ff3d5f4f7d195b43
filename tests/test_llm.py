"""The engine in the user's process: what comes back in which order."""

from __future__ import annotations

from engine import LLM, SamplingParams
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
