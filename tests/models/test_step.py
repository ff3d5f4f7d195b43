"""The step as a whole: token feedback, page-table updates, one graph for all sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from models.forward import as_is, lm_logits, make_backbone
from models.inputs import StepInputs
from models.ops.linear import Kernels
from models.step import make_step
from tests.e2e.smollm2 import GGUF, reference
from tests.e2e.tiny_models import greedy, hf_config, save_model
from tests.models.harness import ONE_RANK, Harness, load


@pytest.fixture(name="tiny", scope="module")
def fixture_tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Any]:
    folder = tmp_path_factory.mktemp("tiny")
    windows = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
    config = hf_config("qwen2", **windows)
    reference = save_model(folder, config)
    return reference, *load(folder)


@torch.no_grad()
def run_step(step: Any, harness: Harness, inputs: StepInputs) -> Tensor:
    outputs = step(harness.params, harness.kv_cache, harness.state, None, inputs)
    packed: Tensor = outputs.packed_LC
    return packed[:, 0]


def test_tokens_feed_back_without_the_host(tiny: tuple[Any, Any, Any]) -> None:
    reference, model, params = tiny
    prompts = [[5, 17, 211, 3, 9], [77, 8]]
    harness = Harness(model, params)
    extend = make_step(model, ONE_RANK, "plain", "extend", 0)
    decode = make_step(model, ONE_RANK, "plain", "decode", 0)
    drawn = [run_step(extend, harness, harness.inputs(dict(enumerate(prompts)), "last"))]
    for _ in range(11):
        drawn.append(run_step(decode, harness, harness.inputs({0: [-1], 1: [-1]}, "last")))
    answers = torch.stack(drawn)[:, :2].T.tolist()
    assert answers == greedy(reference, prompts, 12)


def test_padding_leaves_the_dummy_page_alone(tiny: tuple[Any, Any, Any]) -> None:
    _, model, params = tiny
    harness = Harness(model, params, padding=5)
    harness.logits({0: [4, 5, 6]})
    for layer in harness.kv_cache.layers:
        assert not layer[0].any()
        assert layer.any()


@pytest.mark.parametrize(("by_piece", "fused"), [(False, False), (True, False), (False, True)])
def test_one_graph_serves_all_sizes(
    tiny: tuple[Any, Any, Any], by_piece: bool, fused: bool
) -> None:
    """fullgraph, with symbolic T, R, L and U: compiled once, right for sizes that it never saw."""
    _, model, params = tiny
    compiled = CompileCounter()

    def compile_piece(function: Any) -> Any:
        return torch.compile(function, backend=compiled, fullgraph=True, dynamic=True)

    torch._dynamo.reset()
    piece = compile_piece if by_piece else as_is
    step = make_step(model, ONE_RANK, "plain", "extend", 0, piece, Kernels(fused))
    if not by_piece:
        step = compile_piece(step)
    eager = make_step(model, ONE_RANK, "plain", "extend", 0)
    ours, theirs = Harness(model, params), Harness(model, params)
    counts = []
    # Sizes that happen to be equal in the first step would be taken to be equal always.
    config: Any = torch.fx.experimental._config
    with config.patch(use_duck_shape=False):
        for chunks in ({0: [3, 4, 5], 1: [9, 8]}, {0: [1] * 9}, {1: [2] * 5, 2: [7] * 6, 3: [3]}):
            got = run_step(step, ours, ours.inputs(chunks, "last"))
            want = run_step(eager, theirs, theirs.inputs(chunks, "last"))
            assert got.tolist() == want.tolist()
            counts.append(compiled.frame_count)
    # By piece: embedding, layer, head; the window of a layer may be symbolic, too.
    assert counts[0] in ((3, 4) if by_piece else (1,))
    assert counts == counts[:1] * 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, on Inductor's import
def test_inductor(tiny: tuple[Any, Any, Any]) -> None:
    """Logits of the compiled forward pass equal the eager ones; the cache is written in place."""
    _, model, params = tiny
    ours, theirs = Harness(model, params), Harness(model, params)
    addresses = [layer.data_ptr() for layer in ours.kv_cache.layers]

    def forward(harness: Harness, inputs: StepInputs) -> Tensor:
        hidden = make_backbone(model, ONE_RANK, "extend")(
            harness.params, harness.kv_cache, harness.state, inputs
        )
        return lm_logits(model, ONE_RANK, harness.params, *hidden, inputs)

    torch._dynamo.reset()
    backbone = torch.compile(make_backbone(model, ONE_RANK, "extend"), fullgraph=True, dynamic=True)
    for chunks in ({0: [3, 4, 5], 1: [9, 8]}, {0: [1] * 20, 1: [6]}):
        inputs = ours.inputs(chunks)
        with torch.no_grad():
            hidden = backbone(ours.params, ours.kv_cache, ours.state, inputs)
            got = lm_logits(model, ONE_RANK, ours.params, *hidden, inputs)
            want = forward(theirs, theirs.inputs(chunks))
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert [layer.data_ptr() for layer in ours.kv_cache.layers] == addresses
    for mine, other in zip(ours.kv_cache.layers, theirs.kv_cache.layers, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)


@pytest.mark.skipif(not GGUF.is_file(), reason="FULLGRAPH_SMOLLM2_GGUF names no file")
@pytest.mark.filterwarnings("ignore")  # transformers' own, while it reads GGUF
def test_smollm2_from_gguf() -> None:
    ids = torch.randint(0, 49152, (80,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        theirs = reference()(torch.tensor([ids])).logits[0]
    model, params = load(GGUF)
    assert model.eos_ids == (2,)
    harness = Harness(model, params, page_size=16, max_len=96)
    pieces = [harness.logits({0: ids[:70]})[0]]
    pieces += [harness.logits({0: [token]}, "decode")[0] for token in ids[70:]]
    assert (torch.cat(pieces) - theirs).abs().max().item() < 1e-4
