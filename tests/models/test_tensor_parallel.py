"""Two ranks, processes that talk over gloo, compute what one does."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.multiprocessing.spawn import spawn

from tests.e2e.tiny_models import hf_config, save_model
from tests.models.harness import Harness, load
from tests.models.test_moe import CONFIGS
from tests.models.tp_rank import CHUNKS, run_rank

SIZE = 2


def test_ranks_compute_what_one_does(tmp_path: Path) -> None:
    """Odd vocab and ffn, biases, kv heads split or (only one) repeated, tied heads, experts."""
    odd = {"intermediate_size": 101, "attention_bias": True, "mlp_bias": True}
    configs = {
        "split": hf_config("llama", heads=8, kv_heads=2, **odd),
        "repeated": hf_config("qwen3", heads=8, kv_heads=1, intermediate_size=101),
        "experts": CONFIGS["qwen3_moe, some dense layers"],
    }
    folders = [tmp_path / name for name in configs]
    for folder, config in zip(folders, configs.values(), strict=True):
        save_model(folder, config)
    spawn(run_rank, (SIZE, str(tmp_path / "store"), list(map(str, folders))), nprocs=SIZE)
    for folder in folders:
        alone = Harness(*load(folder))
        for step, chunks in enumerate(CHUNKS):
            expected = alone.logits(chunks)
            for rank in range(SIZE):
                got = torch.load(folder / f"{rank}.{step}.pt")
                for slot, logits in expected.items():
                    torch.testing.assert_close(got[slot], logits, atol=1e-4, rtol=0)
