"""Host work of attention on a GPU: builds every bucket's runner, plans FlashInfer before each step.

FlashInfer decides on the host how a step's rows are cut over the multiprocessors and sends that as a few KB of
integers. Its `plan()` is called on the compiled module itself, for the wrapper's would also copy page lists, which we
make on the device, and cost several times as much. That ties us to one version of FlashInfer, which is checked.
Triton's and XQA's decode kernels need no plan: they read lengths on the device.

Knows nothing of streams beyond the current one, of graphs or of what a layer computes.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.scheduler.batch import I32, ScheduledBatch
from engine.step_inputs import Bucket

try:
    from models.ops import attention_cuda, decode_triton
except ImportError:  # no Triton: a CPU
    attention_cuda = decode_triton = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

FLASHINFER = "0.6.13"
_INT_MARGIN = 1 << 16
_XQA_PAGES = (16, 32, 64, 128)


@dataclass(frozen=True)
class AttentionShape:
    """What the kernels are built for; heads are this rank's.

    Attributes:
        windows: distinct windows of the model's layers, 0 for full attention.
        max_pages: columns of the page table.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    max_pages: int
    dtype: torch.dtype
    windows: tuple[int, ...]

    @property
    def group(self) -> int:
        """Query heads per kv head."""
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, eq=False)
class HostRows:
    """A batch's rows, split as the device splits them: the leading rows of one token decode.

    Attributes:
        starts / lens: of all rows. num_decode: rows at the front with one token (a prompt's last token may be one).
    """

    starts: I32
    lens: I32
    num_decode: int

    @classmethod
    def of(cls, batch: ScheduledBatch) -> HostRows:
        longer = np.flatnonzero(batch.row_lens != 1)
        num_decode = int(longer[0]) if len(longer) else len(batch.row_lens)
        return cls(batch.row_starts, batch.row_lens, num_decode)


class PlanSpace:
    """Where plans of one role and window go: integers on the device, and two staging buffers that alternate.

    Buckets share it, for a bucket is planned before each of its steps. A staging buffer is written again only when
    its copy two plans ago is done.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.ints = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
        self.owner: object = None
        self._staging = [
            torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=True) for _ in range(2)
        ]
        self._copied = [torch.cuda.Event() for _ in range(2)]
        self._turn = 0

    def submit(self, plan: Callable[[Tensor], Any]) -> Any:
        """Call `plan` with a free staging buffer; it enqueues one copy from it."""
        turn, self._turn = self._turn, 1 - self._turn
        self._copied[turn].synchronize()
        info = plan(self._staging[turn])
        self._copied[turn].record()
        return info


class PartPlan:
    """Plans one FlashInferPart.

    Args:
        part: the device side. plan: the module's plan function. space: shared with other buckets.
        num_rows / num_tokens: capacities; of the decode part both are its rows.
    """

    def __init__(
        self,
        part: Any,
        plan: Any,
        backend: str,
        chunks: bool,
        window: int,
        shape: AttentionShape,
        num_rows: int,
        num_tokens: int,
        space: PlanSpace,
    ) -> None:
        self._part, self._plan, self._space = part, plan, space
        self._chunks, self._shape, self._num_rows = chunks, shape, num_rows
        self._fa2 = backend == "fa2"
        self._pages = np.zeros(num_rows, np.int32)
        self._planned_pages = np.full(num_rows, -1, np.int32)
        self._kv_lens = np.ones(num_rows, np.int32)
        self._kv_indptr = np.zeros(num_rows + 1, np.int32)
        self._qo_indptr = np.arange(num_rows + 1, dtype=np.int32)
        tail = [num_tokens, num_rows, shape.num_heads, shape.num_kv_heads, shape.page_size, True]
        tail += [shape.head_dim, shape.head_dim, chunks, window - 1 if window else -1]
        if self._fa2:
            tail += [-1, False, 0]  # no fixed split, splits allowed, no other kernel beside it
        arrays = (self._qo_indptr, self._kv_indptr, self._kv_lens)
        self._tail = [*(torch.from_numpy(a) for a in arrays), *tail]
        self._captured: list[int] | None = None

    def plan(self, rows: HostRows) -> None:
        """Plan for these rows. Enqueues at most one copy."""
        if self._chunks:
            self._set_chunks(rows)
        else:
            self._set_decode(rows)
            # fa2 plans by pages, not by tokens: the plan stands until a row reaches its next page.
            same = self._fa2 and self._space.owner is self
            if same and np.array_equal(self._pages, self._planned_pages):
                return
            self._planned_pages[:] = self._pages
        np.cumsum(self._pages, out=self._kv_indptr[1:])
        part = self._part
        info = self._space.submit(
            lambda staging: self._plan(
                part.float_workspace, part.int_workspace, staging, *self._tail
            )
        )
        self._space.owner = self
        if self._captured is None:
            self._captured = list(info)
        assert list(info) == self._captured, "a plan does not fit the graph that was captured"
        part.plan_info = info

    def _set_decode(self, rows: HostRows) -> None:
        n, page = rows.num_decode, self._shape.page_size
        self._pages[:n] = (rows.starts[:n] + page) // page
        self._pages[n:] = 1
        if not self._fa2:
            self._kv_lens[:n] = rows.starts[:n] + 1
            self._kv_lens[n:] = 1

    def _set_chunks(self, rows: HostRows) -> None:
        n, used, page = rows.num_decode, len(rows.lens), self._shape.page_size
        self._kv_lens[:n] = 0
        self._kv_lens[n:used] = rows.starts[n:] + rows.lens[n:]
        self._kv_lens[used:] = 0
        self._pages[:] = (self._kv_lens + (page - 1)) // page
        # fa2 reads the offsets on the device, where decode rows are rows of no keys; fa3 takes ours and skips them.
        self._qo_indptr[: n + 1] = np.arange(n + 1) if self._fa2 else n
        np.cumsum(rows.lens[n:], out=self._qo_indptr[n + 1 : used + 1])
        self._qo_indptr[n + 1 : used + 1] += n
        self._qo_indptr[used + 1 :] = self._qo_indptr[used]


class AttentionPlanner:
    """Runners of every bucket and window, and their plans.

    Args:
        decode: fa2, fa3, xqa or triton. extend: fa2 or fa3, for the chunks; the decode rows of an extend step go
            through `decode`'s kernel.
        first_layer: the cache of the model's first layer.
        workspace_bytes: FlashInfer's float workspace; made larger where the buckets need it.

    Raises:
        ConfigError: FlashInfer is missing or of another version, or a kernel cannot serve this model.
    """

    def __init__(
        self,
        shape: AttentionShape,
        decode: str,
        extend: str,
        buckets: Sequence[Bucket],
        first_layer: Tensor,
        workspace_bytes: int,
    ) -> None:
        assert attention_cuda is not None, "attention on a GPU needs Triton, which comes with torch"
        self._shape, self._device = shape, first_layer.device
        self._kernels = {"decode": decode, "extend": extend}
        self._check(decode, extend)
        self._most_rows = max(_rows_of(b) for b in buckets)
        most_tokens = max(b.num_tokens for b in buckets)
        num_bytes = max(workspace_bytes, self._float_bytes(most_tokens))
        self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._int_bytes = self._plan_bytes(most_tokens)
        self._spaces: dict[tuple[bool, int], PlanSpace] = {}
        self._modules: dict[tuple[str, int], Any] = {}
        self._scratch = decode_triton.Scratch.of(
            self._most_rows,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            self._device,
        )
        self._plans: dict[Bucket, list[PartPlan]] = {bucket: [] for bucket in buckets}
        runners = {
            (bucket.kind, bucket.num_tokens, window): self._runner(bucket, window)
            for bucket in buckets
            for window in shape.windows
        }
        attention_cuda.register(runners, first_layer)

    def plan(self, bucket: Bucket, batch: ScheduledBatch) -> None:
        """Plan the step's attention for the bucket's graph. Enqueues copies; does not wait for the device."""
        plans = self._plans[bucket]
        if plans:
            rows = HostRows.of(batch)
            for plan in plans:
                plan.plan(rows)

    def close(self) -> None:
        """Forget the runners, so that their memory goes."""
        attention_cuda.unregister()

    def _runner(self, bucket: Bucket, window: int) -> Any:
        num_rows = _rows_of(bucket)
        if bucket.kind == "decode":
            return self._decode_runner(bucket, num_rows, window)
        chunks = self._part(
            bucket, self._kernels["extend"], True, num_rows, bucket.num_tokens, window
        )
        return attention_cuda.Extend(
            chunks, self._decode_runner(bucket, num_rows, window), num_rows
        )

    def _decode_runner(self, bucket: Bucket, num_rows: int, window: int) -> Any:
        shape, kernel = self._shape, self._kernels["decode"]
        if kernel == "triton":
            extend = bucket.kind == "extend"
            return attention_cuda.TritonDecode(
                num_rows, shape.num_kv_heads, window, extend, self._scratch
            )
        if kernel == "xqa":
            return attention_cuda.XqaDecode(
                self._xqa(window),
                num_rows,
                shape.max_pages,
                shape.page_size,
                window,
                self._scratch.counters,
                self._workspace,
                torch.cuda.get_device_properties(self._device).multi_processor_count,
            )
        return attention_cuda.FlashInferDecode(
            self._part(bucket, kernel, False, num_rows, num_rows, window)
        )

    def _part(
        self,
        bucket: Bucket,
        backend: str,
        chunks: bool,
        num_rows: int,
        num_tokens: int,
        window: int,
    ) -> Any:
        shape = self._shape
        if (chunks, window) not in self._spaces:
            self._spaces[chunks, window] = PlanSpace(self._int_bytes, self._device)
        space = self._spaces[chunks, window]
        module = self._prefill_module(backend, window)
        part = attention_cuda.FlashInferPart(
            module.paged_run,
            backend,
            chunks,
            window,
            num_rows,
            shape.max_pages,
            shape.page_size,
            self._workspace,
            space.ints,
        )
        plan = PartPlan(
            part, module.plan, backend, chunks, window, shape, num_rows, num_tokens, space
        )
        self._plans[bucket].append(plan)
        return part

    def _prefill_module(self, backend: str, window: int) -> Any:
        key = (backend, int(window > 0))
        if key not in self._modules:
            jit, dtype, dim = flashinfer("jit.attention"), self._shape.dtype, self._shape.head_dim
            spec = jit.gen_batch_prefill_module(
                backend, dtype, dtype, dtype, torch.int32, dim, dim, 0, window > 0, False, False
            )
            self._modules[key] = _load(spec)
        return self._modules[key]

    def _xqa(self, window: int) -> Any:
        key = ("xqa", int(window > 0))
        if key not in self._modules:
            shape, dtype = self._shape, self._shape.dtype
            spec = flashinfer("jit.xqa").gen_xqa_module(
                dtype, dtype, shape.page_size, shape.head_dim, shape.group, window > 0, dtype, 1
            )
            self._modules[key] = _xqa_call(_load(spec))
        return self._modules[key]

    def _check(self, decode: str, extend: str) -> None:
        shape, major = self._shape, torch.cuda.get_device_capability(self._device)[0]
        if shape.dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"model.dtype: attention on a GPU is bfloat16 or float16, not {shape.dtype}"
            )
        for key, kernel in (("decode", decode), ("extend", extend)):
            if kernel == "fa3" and major != 9:
                raise ConfigError(f"attention.{key}: fa3 needs a Hopper GPU")
        if decode == "xqa" and (shape.page_size not in _XQA_PAGES or major < 9):
            raise ConfigError(
                f"attention.decode: xqa needs Hopper or later and kv.page_size in {_XQA_PAGES}, "
                f"got {shape.page_size}"
            )

    def _float_bytes(self, most_tokens: int) -> int:
        """fa2 keeps a partial result of every tile of a padded plan: tiles * rows of a tile * heads * D floats."""
        shape = self._shape
        programs = torch.cuda.get_device_properties(self._device).multi_processor_count * 2
        decode = _tiles(self._most_rows, 16, self._most_rows, shape.group)
        tile_rows = 16 * max(programs // shape.num_kv_heads, decode)
        if self._kernels["extend"] == "fa2":
            chunks = _tiles(most_tokens, 128, self._most_rows, shape.group)
            tile_rows = max(tile_rows, 128 * max(programs // shape.num_kv_heads, chunks))
        return tile_rows * shape.num_heads * (shape.head_dim + 1) * 4 + _INT_MARGIN

    def _plan_bytes(self, most_tokens: int) -> int:
        """Integers of the largest plan: seven per piece of work for fa3, four per tile and one per token for fa2."""
        shape, rows = self._shape, self._most_rows
        fa3 = 28 * (-(-most_tokens // 128) + rows) * shape.num_heads
        tiles = _tiles(most_tokens, 16, rows, shape.group) + 1024
        fa2 = 16 * tiles + 4 * (most_tokens + rows)
        return max(fa3, fa2) + _INT_MARGIN


def build_planner(
    config: EngineConfig,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    windows: Sequence[int],
    buckets: Sequence[Bucket],
    page_table_SP: Tensor,
    first_layer: Tensor,
) -> AttentionPlanner:
    """The planner of a resolved configuration; heads are this rank's, windows those of the layers."""
    shape = AttentionShape(
        num_heads,
        num_kv_heads,
        head_dim,
        config.kv.page_size,
        page_table_SP.shape[1],
        first_layer.dtype,
        tuple(sorted(set(windows))),
    )
    attention = config.attention
    return AttentionPlanner(
        shape,
        attention.decode,
        attention.extend,
        buckets,
        first_layer,
        int(attention.workspace),
    )


def flashinfer(module: str) -> Any:
    """A module of FlashInfer's; ConfigError says what to install if it is missing or of another version."""
    install = f"pip install flashinfer-python=={FLASHINFER} (or fullgraph[cuda])"
    try:
        package = importlib.import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(
            f"attention: FlashInfer is needed on a GPU: {install} ({error})"
        ) from error
    if package.__version__ != FLASHINFER:
        raise ConfigError(
            f"attention: FlashInfer {package.__version__} is installed, {FLASHINFER} is needed: {install}"
        )
    return importlib.import_module(f"flashinfer.{module}")


def _load(spec: Any) -> Any:
    """Load a kernel module, building it if no built one is found: minutes of nvcc, so say so first."""
    logger.info("FlashInfer module %s (built on first use, which takes minutes)", spec.name)
    return spec.build_and_load()


def _xqa_call(module: Any) -> Callable[..., None]:
    """XQA's entry, which takes each scale as a number and as a tensor."""

    def call(*args: Any) -> None:
        head, tail = args[:4], args[5:]
        q_scale = args[4]
        before, kv_scale = tail[:12], tail[12]
        semaphores, workspace, pdl, q_len, mask = tail[13:]
        module.xqa_wrapper(
            *head, q_scale, None, *before, kv_scale, None, q_len, mask, semaphores, workspace, pdl
        )

    return call


def _rows_of(bucket: Bucket) -> int:
    """Rows that a step of the bucket can have: each has at least one token."""
    return min(bucket.num_rows, bucket.num_tokens)


def _tiles(tokens: int, tile: int, rows: int, group: int) -> int:
    """Query tiles at most, as FlashInfer bounds them in its graph mode."""
    return -(-tokens * group // tile) + rows
