"""Runs the model side alone, eagerly: sequences in, logits of every token out.

Owns a small paged cache with scattered pages, so that nothing works by luck of the layout. Knows
nothing of the
engine: what a scheduler decides is decided here by the caller, chunk by chunk.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.config import ModelConfig
from models.forward import PLAIN, lm_logits, make_backbone
from models.inputs import KVCache, StepInputs, StepState, TensorParallel
from models.ops.linear import Kernels
from models.sharding import local_heads
from models.weights import load_params, resolve_checkpoint

Chunks = Mapping[int, Sequence[int]]  # slot -> token ids, appended to what the slot holds
ONE_RANK = TensorParallel()


def load(
    folder: Path, dtype: torch.dtype = torch.float32, tp: TensorParallel = ONE_RANK
) -> tuple[ModelConfig, dict[str, Any]]:
    """Configuration and a rank's parameters of a checkpoint, on the CPU."""
    checkpoint = resolve_checkpoint(str(folder))
    model = ModelConfig.from_hf(checkpoint.config)
    return model, load_params(model, tp, checkpoint, dtype, torch.device("cpu"))


class Harness:
    """A model with a paged cache and a few slots.

    Args:
        model / params: as `load` returns them.
        page_size: tokens per page.
        num_slots: sequences at a time.
        max_len: longest of them.
        padding: tokens, rows, logit rows and updates of padding in every step.
        tp: this rank's place; `params` are its own.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: dict[str, Any],
        *,
        page_size: int = 4,
        num_slots: int = 4,
        max_len: int = 64,
        padding: int = 3,
        tp: TensorParallel = ONE_RANK,
        seed: int = 0,
    ) -> None:
        self.tp = tp
        self.model = model
        self.params = params
        self.page_size = page_size
        self.padding = padding
        self.dummy_slot = num_slots
        columns = -(-max_len // page_size)
        num_pages = num_slots * columns + 1
        dtype = params["embed"].dtype
        shape = (num_pages, 2, page_size, local_heads(model, tp)[1], model.head_dim)
        self.kv_cache = KVCache(tuple(torch.zeros(shape, dtype=dtype) for _ in model.layer_windows))
        self.state = StepState(
            torch.zeros(num_slots + 1, columns, dtype=torch.int32),
            torch.zeros(num_slots + 1, dtype=torch.int32),
        )
        self.lengths = [0] * num_slots
        self._pages: list[list[int]] = [[] for _ in range(num_slots)]
        self._free = list(range(1, num_pages))
        random.Random(seed).shuffle(self._free)

    def inputs(self, chunks: Chunks, logits: str = "all") -> StepInputs:
        """The step that appends the chunks, one row each, in the order given. Advances the slots.

        Args:
            chunks: an id of -1 is the slot's last drawn token.
            logits: "all" tokens' or only the "last" of each row.
        """
        columns: dict[str, list[int]] = {name: [] for name in StepInputs._fields}
        for slot, ids in chunks.items():
            start, offset = self.lengths[slot], len(columns["token_ids_T"])
            positions = range(start, start + len(ids))
            self._grow(slot, start + len(ids), columns)
            self.lengths[slot] += len(ids)
            columns["token_ids_T"] += ids
            columns["positions_T"] += positions
            columns["token_slots_T"] += [slot] * len(ids)
            columns["kv_slots_T"] += [self._place(slot, position) for position in positions]
            for name, value in (
                ("row_slots_R", slot),
                ("row_starts_R", start),
                ("row_lens_R", len(ids)),
                ("row_offsets_R", offset),
            ):
                columns[name].append(value)
            wanted = range(len(ids)) if logits == "all" else range(len(ids) - 1, len(ids))
            columns["logit_tokens_L"] += [offset + i for i in wanted]
            columns["logit_slots_L"] += [slot for _ in wanted]
            columns["logit_targets_L"] += [-1 for _ in wanted]
            columns["logit_positions_L"] += [start + i + 1 for i in wanted]
        return self._padded(columns)

    @torch.no_grad()
    def logits(
        self, chunks: Chunks, kind: str = "extend", kernels: Kernels = PLAIN
    ) -> dict[int, Tensor]:
        """Run one step: slot -> logits [tokens of its chunk, V]."""
        inputs = self.inputs(chunks)
        backbone = make_backbone(self.model, self.tp, kind, kernels=kernels)
        hidden = backbone(self.params, self.kv_cache, self.state, inputs)
        logits = lm_logits(self.model, self.tp, self.params, *hidden, inputs)
        sizes = [len(ids) for ids in chunks.values()]
        return dict(zip(chunks, torch.split(logits[: sum(sizes)], sizes), strict=True))

    def _place(self, slot: int, position: int) -> int:
        page = self._pages[slot][position // self.page_size]
        return page * self.page_size + position % self.page_size

    def _grow(self, slot: int, length: int, columns: dict[str, list[int]]) -> None:
        pages = self._pages[slot]
        while len(pages) * self.page_size < length:
            columns["update_slots_U"].append(slot)
            columns["update_columns_U"].append(len(pages))
            columns["update_pages_U"].append(self._free[-1])
            pages.append(self._free.pop())

    def _padded(self, columns: dict[str, list[int]]) -> StepInputs:
        """Pad as models.inputs.StepInputs says; sampling is greedy."""
        num_logits = len(columns["logit_tokens_L"])
        fills = {"kv_slots_T": -1, "logit_targets_L": -2}
        tensors = {}
        for name, values in columns.items():
            fill = self.dummy_slot if "_slots_" in name else 0
            fill = fills.get(name, fill)
            tensors[name] = torch.tensor(values + [fill] * self.padding, dtype=torch.int32)
        rows = num_logits + self.padding
        tensors["sampling_floats_LF"] = torch.tensor([[0.0, 1.0, 0.0, 1.0, 0.0, 0.0]]).repeat(
            rows, 1
        )
        tensors["sampling_ints_LI"] = torch.zeros(rows, 4, dtype=torch.int32)
        return StepInputs(**tensors)
