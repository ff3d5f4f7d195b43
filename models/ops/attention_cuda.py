"""CUDA implementations of `fullgraph::paged_attention`, `fullgraph::kv_write` and what they run on.

The table of planned runners below is the project's one global: the operator looks its runner up by
(kind, tokens, window), because FlashInfer's plans are host objects that no graph can take as an
argument. engine/attention_plan.py fills the table before any graph is captured and plans before
every step.

The first layer of a step makes the page lists or plans that all layers use, in device memory
outside the graphs' pool. It is known by its cache's address: no graph may depend on a host counter.

Knows nothing of batches or buckets, nor of FlashInfer's package: it is given its modules. Importing
it needs Triton.

Legend: T tokens, R rows, S slots, P page-table columns, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, library

from models.ops import decode_triton, fused, fused_triton, page_lists_triton

_CAUSAL, _FULL = 1, 0  # FlashInfer's MaskMode
_NHD = 0  # FlashInfer's TensorLayout


class Rows(NamedTuple):
    """A step's rows as the operator gets them."""

    page_table_SP: Tensor
    row_slots_R: Tensor
    row_starts_R: Tensor
    row_lens_R: Tensor
    row_offsets_R: Tensor


class Runner(Protocol):
    """Attention of one bucket and window."""

    def prepare(self, rows: Rows) -> None:
        """Make the page lists of the step; called by its first layer."""

    def run(
        self, q_THD: Tensor, kv_layer: Tensor, rows: Rows, scale: float, out_THD: Tensor
    ) -> None:
        """Write the rows' attention into `out_THD`."""


Key = tuple[str, int, int]  # kind, tokens of the bucket, window


@dataclass
class _Table:
    """The planned runners, and the address of the cache of the first layer."""

    runners: dict[Key, Runner]
    first_layer: int


_table = _Table({}, 0)


def register(runners: Mapping[Any, Runner], first_layer: Tensor) -> None:
    """Make `runners` the table, for the model whose first layer's cache is `first_layer`."""
    _table.runners, _table.first_layer = dict(runners), first_layer.data_ptr()


def runner(kind: str, num_tokens: int, window: int) -> Runner:
    """The runner of a bucket and window; it is our own mistake if there is none."""
    found = _table.runners.get((kind, num_tokens, window))
    assert found is not None, f"no attention planned for {kind} {num_tokens}, window {window}"
    return found


def is_first(kv_layer: Tensor) -> bool:
    """Whether this is the first layer's cache."""
    return kv_layer.data_ptr() == _table.first_layer


def prepare(kind: str, num_tokens: int, rows: Rows) -> None:
    """Make what all layers of a step use, for every window of the bucket."""
    for (of_kind, of_tokens, _), planned in _table.runners.items():
        if (of_kind, of_tokens) == (kind, num_tokens):
            planned.prepare(rows)


def unregister() -> None:
    """Empty the table and let its buffers go."""
    _table.runners, _table.first_layer = {}, 0


@library.impl("fullgraph::paged_attention", "cuda")
def _paged_attention(
    q_THD: Tensor,
    kv_layer: Tensor,
    page_table_SP: Tensor,
    row_slots_R: Tensor,
    row_starts_R: Tensor,
    row_lens_R: Tensor,
    row_offsets_R: Tensor,
    scale: float,
    window: int,
    kind: str,
) -> Tensor:
    planned = runner(kind, q_THD.shape[0], window)
    rows = Rows(page_table_SP, row_slots_R, row_starts_R, row_lens_R, row_offsets_R)
    if is_first(kv_layer):
        prepare(kind, q_THD.shape[0], rows)
    out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if kind == "extend":  # no one writes padding here, and it must be finite
        page_lists_triton.clear_padding(out_THD, row_lens_R)
    planned.run(q_THD, kv_layer, rows, scale, out_THD)
    return out_THD


@fused.decode_attention.register_kernel("cuda")
def _decode_attention(
    qkv: Tensor,
    rope_TD: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv_layer: Tensor,
    kv_slots_T: Tensor,
    page_table_SP: Tensor,
    row_slots_R: Tensor,
    row_starts_R: Tensor,
    row_lens_R: Tensor,
    row_offsets_R: Tensor,
    scale: float,
    window: int,
    pdl: bool,
) -> Tensor:
    planned = runner("decode", qkv.shape[0], window)
    rows = Rows(page_table_SP, row_slots_R, row_starts_R, row_lens_R, row_offsets_R)
    num_kv_heads, head_dim = kv_layer.shape[3:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    if is_first(kv_layer):
        prepare("decode", len(qkv), rows)
    # With memory behind it up to whole tiles of the product that reads it (between_gluon.py).
    padded = -(-len(qkv) // 64) * 64
    out_THD = qkv.new_empty((padded, num_heads, head_dim))[: len(qkv)]
    if isinstance(planned, TritonDecode):
        new = decode_triton.NewToken(qkv, rope_TD, q_norm, k_norm, eps, kv_slots_T)
        planned.run(new, kv_layer, rows, scale, out_THD)
        return out_THD
    sizes = (num_heads, num_kv_heads, head_dim)
    norms = (q_norm, k_norm)
    q_THD = fused_triton.heads(qkv, rope_TD, *norms, eps, *sizes, kv_layer, kv_slots_T, pdl)
    planned.run(q_THD, kv_layer, rows, scale, out_THD)
    return out_THD


library.impl("fullgraph::kv_write", "cuda")(fused_triton.kv_write)


class FlashInferPart:
    """One planned FlashInfer call: the decode rows, or the chunks, of a bucket.

    Args:
        run: the module's paged run function, of FlashInfer 0.6.13.
        backend: fa2 or fa3; they take different trailing arguments.
        chunks: whether it serves the chunks (causal) or the decode rows.
        num_rows: requests of the plan.
        max_pages: of one row.
        float_workspace / int_workspace: uint8, shared with parts that never run between this one's
            plan and run.
    """

    def __init__(
        self,
        run: Any,
        backend: str,
        chunks: bool,
        window: int,
        num_rows: int,
        max_pages: int,
        page_size: int,
        float_workspace: Tensor,
        int_workspace: Tensor,
    ) -> None:
        zeros = partial(torch.zeros, dtype=torch.int32, device=float_workspace.device)
        self.float_workspace, self.int_workspace = float_workspace, int_workspace
        # What the last plan returned; the planner checks that it never changes.
        self.plan_info: Any = None
        self._run, self._backend, self._chunks, self._window = run, backend, chunks, window
        self._page_size = page_size
        self._qo_indptr = torch.arange(num_rows + 1, out=zeros(num_rows + 1))
        self._kv_indptr = zeros(num_rows + 1)
        self._kv_indices = zeros(num_rows * max_pages)
        self._last_page_len = zeros(num_rows)

    def prepare(self, rows: Rows) -> None:
        """Fill the page lists from the page table."""
        page_lists_triton.fill_page_lists(
            *rows,
            self._page_size,
            self._chunks,
            self._kv_indptr,
            self._kv_indices,
            self._last_page_len,
            self._qo_indptr if self._chunks else None,
        )

    def run(
        self, q_THD: Tensor, kv_layer: Tensor, rows: Rows, scale: float, out_THD: Tensor
    ) -> None:
        """Write the attention of the part's rows into `out_THD`; the fa2 chunks part zeroes decode
        rows, a decode part's padding attends to one zero token of page 0.
        """
        assert self.plan_info is not None, "a FlashInfer part ran before it was planned"
        args = [
            self.float_workspace,
            self.int_workspace,
            self.plan_info,
            q_THD,
            kv_layer[:, 0],
            kv_layer[:, 1],
            self._qo_indptr,
            self._kv_indptr,
            self._kv_indices,
            self._last_page_len,
            out_THD,
            None,  # log-sum-exp
            _CAUSAL if self._chunks else _FULL,
            _NHD,
            self._window - 1 if self._window else -1,
            True,  # programmatic dependent launch
        ]
        if self._backend == "fa2":
            # mask, its indptr, ALiBi slopes, multi-item prefix, positions, longest; fp4 scales of k
            # and v
            args += [None] * 8
            args += [0.0, scale, 1.0, 1e-4, 0]  # soft cap, scale, 1 / rope scale, 1 / theta, items
        else:
            # multi-item prefix, positions, longest; scale of v as a tensor, soft cap, scale, scale
            # of v, items
            args += [None, None, None, None, 0.0, scale, 1.0, 0]
        self._run(*args)


class TritonDecode:
    """Our own decode kernel: planned on the device, reads the page table itself.

    Args:
        num_rows: rows that may decode (the bucket's rows, at most its tokens).
        extend: rows that do not decode are left alone instead of zeroed.
    """

    def __init__(
        self,
        num_rows: int,
        window: int,
        extend: bool,
        scratch: decode_triton.Scratch,
        shape: decode_triton.DecodeShape,
    ) -> None:
        self._num_rows, self._window, self._extend = num_rows, window, extend
        self._scratch = scratch
        self._pdl = supports_pdl(scratch.partial.device)
        self.cut(shape)

    def cut(self, shape: decode_triton.DecodeShape) -> None:
        """Cut rows this way from the next `prepare` on; not into more pieces than at first."""
        device = self._scratch.partial.device
        self._cut = decode_triton.Cut.of(self._num_rows, self._window, shape, device)

    def prepare(self, rows: Rows) -> None:
        """Cut the step's rows into pieces of work."""
        decode_triton.plan(*rows[1:], self._num_rows, self._extend, self._cut)

    def run(
        self,
        query: Tensor | decode_triton.NewToken,
        kv_layer: Tensor,
        rows: Rows,
        scale: float,
        out_THD: Tensor,
    ) -> None:
        """Attention of the decode rows; with NewToken their keys and values are written first."""
        where = (kv_layer, rows.page_table_SP, self._cut, self._scratch)
        decode_triton.decode(query, *where, scale, is_first(kv_layer), out_THD, self._pdl)


def supports_pdl(device: torch.device) -> bool:
    """Programmatic dependent launch: Hopper and later."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


class XqaDecode:
    """FlashInfer's XQA kernel: block tables and lengths on the device, no plan.

    Args:
        run: flashinfer.xqa's module function, of FlashInfer 0.6.13.
        semaphores: int32 zeros, num_rows * K; workspace: uint8; both shared by all buckets.
        num_programs: multiprocessors it should plan for; more of them means more splits of a row.
    """

    def __init__(
        self,
        run: Any,
        num_rows: int,
        max_pages: int,
        page_size: int,
        window: int,
        semaphores: Tensor,
        workspace: Tensor,
        num_programs: int,
    ) -> None:
        zeros = partial(torch.zeros, dtype=torch.int32, device=workspace.device)
        self._run, self._page_size, self._window = run, page_size, window
        self._block_table = zeros(num_rows, max_pages)
        self._kv_lens = zeros(num_rows, 1) + 1
        self._semaphores, self._workspace = semaphores, workspace
        self.num_programs = num_programs

    def prepare(self, rows: Rows) -> None:
        page_lists_triton.fill_block_table(
            *rows, self._page_size, self._block_table, self._kv_lens.view(-1)
        )

    def run(
        self, q_THD: Tensor, kv_layer: Tensor, rows: Rows, scale: float, out_THD: Tensor
    ) -> None:
        num_rows, max_pages = self._block_table.shape
        self._run(
            False,  # fp8 kernel
            self.num_programs,
            kv_layer.shape[3],
            self._window,
            scale * math.sqrt(q_THD.shape[2]),  # it divides by sqrt(D) itself
            out_THD[:num_rows, None],
            1.0,  # 1 / scale of the output
            q_THD[:num_rows, None].contiguous(),
            None,  # sinks
            kv_layer[:, 0],
            kv_layer[:, 1],
            None,  # fp4 scales of k and v
            None,
            self._block_table,
            max_pages * self._page_size,
            self._kv_lens.view(torch.uint32),
            num_rows,
            1.0,  # scale of k and v
            self._semaphores.view(torch.uint32),
            self._workspace,
            True,  # programmatic dependent launch
            1,  # query tokens of a row
            None,  # mask
        )


@dataclass(frozen=True, eq=False)
class Extend:
    """Chunks through one FlashInfer part, decode rows through a decode runner of their own.

    Decode rows keep their split over the keys that way, however long they are. Runners other than
    Triton's write every row they know, so theirs go through a buffer.
    """

    chunks: FlashInferPart
    decode: Runner
    num_rows: int

    def prepare(self, rows: Rows) -> None:
        self.chunks.prepare(rows)
        self.decode.prepare(rows)

    def run(
        self, q_THD: Tensor, kv_layer: Tensor, rows: Rows, scale: float, out_THD: Tensor
    ) -> None:
        self.chunks.run(q_THD, kv_layer, rows, scale, out_THD)
        if isinstance(self.decode, TritonDecode):
            self.decode.run(q_THD, kv_layer, rows, scale, out_THD)
            return
        some_RHD = torch.empty_like(out_THD[: self.num_rows])
        self.decode.run(q_THD[: self.num_rows], kv_layer, rows, scale, some_RHD)
        page_lists_triton.copy_decode_rows(some_RHD, rows.row_lens_R, rows.row_offsets_R, out_THD)
