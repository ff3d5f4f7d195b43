"""Logits equal Hugging Face's: every family, head layout, chunking, window and rope scaling."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.e2e.tiny_models import FAMILIES, VOCAB, hf_config, save_model
from tests.models.harness import Harness, load

TOLERANCE = 1e-4


def ids_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(length)]


@torch.no_grad()
def hf_logits(reference: Any, ids: list[int]) -> Tensor:
    logits: Tensor = reference(torch.tensor([ids])).logits[0]
    return logits


def by_chunks(harness: Harness, slot: int, ids: list[int], size: int) -> Tensor:
    kind = "decode" if size == 1 else "extend"
    pieces = [
        harness.logits({slot: ids[at : at + size]}, kind)[slot] for at in range(0, len(ids), size)
    ]
    return torch.cat(pieces)


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() < TOLERANCE


HEADS = [(4, 4, 32), (4, 2, 64), (4, 1, 128), (14, 2, 32), (7, 1, 64)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), HEADS)
def test_every_family_and_head_layout(
    family: str, heads: int, kv_heads: int, head_dim: int, tmp_path: Path
) -> None:
    config = hf_config(
        family,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        layers=3,
        # transformers wants hidden_size to be a multiple of the heads
        hidden_size=56 if heads % 7 == 0 else 64,
        tie_word_embeddings=heads == 4,
    )
    reference = save_model(tmp_path, config)
    harness = Harness(*load(tmp_path))
    ids = ids_of(40, 1)
    theirs = hf_logits(reference, ids)
    for slot, size in enumerate((len(ids), 1, 7)):
        assert_close(by_chunks(harness, slot, ids, size), theirs)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_mixed_batch(family: str, page_size: int, tmp_path: Path) -> None:
    """Prompts of several lengths, then steps that hold decode rows and chunks at once."""
    reference = save_model(tmp_path, hf_config(family))
    harness = Harness(*load(tmp_path), page_size=page_size)
    sequences = [ids_of(length, length) for length in (40, 9, 33, 52)]
    theirs = [hf_logits(reference, ids) for ids in sequences]
    rng = random.Random(page_size)
    done = [0] * len(sequences)
    while any(at < len(ids) for at, ids in zip(done, sequences, strict=True)):
        chunks = {}
        for slot in rng.sample(range(4), rng.randrange(1, 5)):
            left = sequences[slot][done[slot] :]
            if left:
                chunks[slot] = left[: rng.choice((1, 1, 1, 3, 17))]
        if not chunks:
            continue
        for slot, logits in harness.logits(chunks).items():
            end = done[slot] + len(logits)
            assert_close(logits, theirs[slot][done[slot] : end])
            done[slot] = end


WINDOW = 8


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 3 * WINDOW])
@pytest.mark.parametrize(
    ("family", "extra"),
    [
        ("mistral", {"sliding_window": WINDOW}),
        ("mistral", {"sliding_window": None}),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
        ),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": WINDOW,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        ),
        ("qwen3", {"use_sliding_window": False, "sliding_window": WINDOW}),
    ],
)
def test_windows(family: str, extra: dict[str, Any], length: int, tmp_path: Path) -> None:
    reference = save_model(tmp_path, hf_config(family, **extra))
    ids = ids_of(length, length)
    theirs = hf_logits(reference, ids)
    harness = Harness(*load(tmp_path))
    for slot, size in enumerate((length, 1, 5)):
        assert_close(by_chunks(harness, slot, ids, size), theirs)


def test_ministral(tmp_path: Path) -> None:
    """Full and sliding layers by turns, as an architecture of its own."""
    base = hf_config("mistral", layers=3, sliding_window=WINDOW).to_dict()
    base["layer_types"] = ["full_attention", "sliding_attention", "full_attention"]
    del base["model_type"]
    reference = save_model(tmp_path, transformers.MinistralConfig(**base))
    model, params = load(tmp_path)
    assert model.architecture == "MinistralForCausalLM"
    assert model.layer_windows == (0, WINDOW, 0)
    ids = ids_of(3 * WINDOW, 0)
    assert_close(Harness(model, params).logits({0: ids})[0], hf_logits(reference, ids))


SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn, attention factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 0.8,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "truncate": False,
    },
    "yarn, mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
    },
    "default": {"rope_type": "default"},
}


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("style", ["rope_parameters", "rope_scaling"])
def test_rope_scalings_past_the_original_length(scaling: str, style: str, tmp_path: Path) -> None:
    rope = {"rope_theta": 5000.0, **SCALINGS[scaling]}
    config = hf_config("llama", rope_parameters=rope, max_position_embeddings=128)
    reference = save_model(tmp_path, config)
    if style == "rope_scaling":  # as transformers 4 wrote it
        file = tmp_path / "config.json"
        saved = json.loads(file.read_text())
        saved["rope_theta"] = saved["rope_parameters"].pop("rope_theta")
        saved["rope_scaling"] = saved.pop("rope_parameters")
        file.write_text(json.dumps(saved))
    ids = ids_of(100, 3)
    harness = Harness(*load(tmp_path), max_len=128)
    assert_close(harness.logits({0: ids})[0], hf_logits(reference, ids))


@pytest.mark.parametrize("scaling", [name for name in SCALINGS if name != "default"])
def test_a_scaling_changes_the_logits(scaling: str, tmp_path: Path) -> None:
    """Otherwise the test above could not fail."""
    ids = ids_of(100, 3)
    logits = []
    for name in ("default", scaling):
        folder = tmp_path / name
        rope = {"rope_theta": 5000.0, **SCALINGS[name]}
        save_model(folder, hf_config("llama", rope_parameters=rope, max_position_embeddings=128))
        logits.append(Harness(*load(folder), max_len=128).logits({0: ids})[0])
    assert (logits[0] - logits[1]).abs().max().item() > 100 * TOLERANCE
