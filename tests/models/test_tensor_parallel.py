"""Several ranks, processes that talk over gloo, compute what one does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import spawn

from tests.e2e.tiny_models import hf_config, save_model
from tests.models.harness import Harness, load
from tests.models.tp_rank import CHUNKS, run_rank


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_compute_what_one_does(size: int, tmp_path: Path) -> None:
    """Odd vocab and ffn, biases, and with four ranks fewer kv heads than ranks."""
    config = hf_config(
        "llama", heads=8, kv_heads=2, intermediate_size=101, attention_bias=True, mlp_bias=True
    )
    save_model(tmp_path, config)
    spawn(run_rank, (size, str(tmp_path)), nprocs=size)
    alone = Harness(*load(tmp_path))
    for step, chunks in enumerate(CHUNKS):
        expected = alone.logits(chunks)
        for rank in range(size):
            got = torch.load(tmp_path / f"{rank}.{step}.pt")
            for slot, logits in expected.items():
                torch.testing.assert_close(got[slot], logits, atol=1e-4, rtol=0)
