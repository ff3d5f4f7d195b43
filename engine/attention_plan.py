"""Host work of attention on a GPU: builds every bucket's runner, plans before each step.

FlashInfer's calls are planned (flashinfer_plan.py). Triton's and XQA's decode kernels need no plan:
they read lengths on the device. Knows nothing of streams beyond the current one, of graphs or of
what a layer computes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from compile_cache.session import Session
from engine.errors import ConfigError
from engine.flashinfer_plan import (
    AttentionShape,
    HostRows,
    PartPlan,
    PlanSpace,
    flashinfer,
    load_module,
    xqa_call,
)
from engine.resolve import chunk_kernel
from engine.scheduler.batch import ScheduledBatch
from engine.step_inputs import Bucket

try:
    from models.ops import attention_cuda, decode_triton
except ImportError:  # no Triton: a CPU
    attention_cuda = decode_triton = None  # type: ignore[assignment]

_INT_MARGIN = 1 << 16
_XQA_PAGES = (16, 32, 64, 128)


class AttentionPlanner:
    """Runners of every bucket and window, and their plans.

    Args:
        decode: fa2, fa3, xqa or triton. extend: fa2, fa3 or mixed, for the chunks; the decode rows
            of an extend step go through `decode`'s kernel.
        first_layer: the cache of the model's first layer.
        workspace_bytes: FlashInfer's float workspace; made larger where the buckets need it.
        keeper: of FlashInfer's built modules, an entry of the compile cache.

    Raises:
        ConfigError: FlashInfer is missing or of another version, or a kernel cannot serve this
            model.
    """

    def __init__(
        self,
        shape: AttentionShape,
        decode: str,
        extend: str,
        buckets: Sequence[Bucket],
        first_layer: Tensor,
        workspace_bytes: int,
        keeper: Session | None = None,
    ) -> None:
        assert attention_cuda is not None, "attention on a GPU needs Triton, which comes with torch"
        self._shape, self._device, self._keeper = shape, first_layer.device, keeper
        self._kernels = {"decode": decode, "extend": extend}
        self._check(decode, extend)
        self._most_rows = max(_rows_of(b) for b in buckets)
        self._wave = chunk_wave(self._device, shape.num_heads, shape.head_dim)
        chunks = [b.num_tokens for b in buckets if b.kind == "extend"]
        split = [n for n in chunks if chunk_kernel(extend, n, self._wave) == "fa2"]
        most_tokens = max(b.num_tokens for b in buckets)
        num_bytes = max(workspace_bytes, self._float_bytes(max(split, default=0)))
        self._workspace = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        self._int_bytes = self._plan_bytes(most_tokens)
        self._spaces: dict[tuple[bool, int], PlanSpace] = {}
        self._modules: dict[str, Any] = {}
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
        """Plan the step's attention for the bucket's graph. Enqueues copies; does not wait for the
        device.
        """
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
        kernel = chunk_kernel(self._kernels["extend"], bucket.num_tokens, self._wave)
        chunks = self._part(bucket, kernel, True, num_rows, bucket.num_tokens, window)
        return attention_cuda.Extend(
            chunks, self._decode_runner(bucket, num_rows, window), num_rows
        )

    def _decode_runner(self, bucket: Bucket, num_rows: int, window: int) -> Any:
        shape, kernel = self._shape, self._kernels["decode"]
        if kernel == "triton":
            extend = bucket.kind == "extend"
            cut = decode_triton.decode_shape(num_rows, shape.num_kv_heads, shape.group)
            return attention_cuda.TritonDecode(num_rows, window, extend, self._scratch, cut)
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
        return self._part(bucket, kernel, False, num_rows, num_rows, window)

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
        dtype, dim, swa = self._shape.dtype, self._shape.head_dim, window > 0

        def spec() -> Any:
            return flashinfer("jit.attention").gen_batch_prefill_module(
                backend, dtype, dtype, dtype, torch.int32, dim, dim, 0, swa, False, False
            )

        return self._module(f"prefill-{backend}-{_name(dtype)}-{dim}-{int(swa)}", spec)

    def _xqa(self, window: int) -> Any:
        dtype, swa = self._shape.dtype, window > 0
        page, dim, group = self._shape.page_size, self._shape.head_dim, self._shape.group

        def spec() -> Any:
            module = flashinfer("jit.xqa").gen_xqa_module
            return module(dtype, dtype, page, dim, group, swa, dtype, 1)

        name = f"xqa-{_name(dtype)}-{page}-{dim}-{group}-{int(swa)}"
        return xqa_call(self._module(name, spec))

    def _module(self, name: str, spec: Callable[[], Any]) -> Any:
        if name not in self._modules:
            self._modules[name] = load_module(name, spec, self._keeper)
        return self._modules[name]

    def _check(self, decode: str, extend: str) -> None:
        shape, major = self._shape, torch.cuda.get_device_capability(self._device)[0]
        if shape.dtype not in (torch.bfloat16, torch.float16):
            raise ConfigError(
                f"model.dtype: attention on a GPU is bfloat16 or float16, not {shape.dtype}"
            )
        for key, kernel in (("decode", decode), ("extend", extend)):
            if kernel in ("fa3", "mixed") and major != 9:
                raise ConfigError(f"attention.{key}: {kernel} needs a Hopper GPU")
        if decode == "xqa" and (shape.page_size not in _XQA_PAGES or major < 9):
            raise ConfigError(
                f"attention.decode: xqa needs Hopper or later and kv.page_size in {_XQA_PAGES}, "
                f"got {shape.page_size}"
            )

    def _float_bytes(self, most_tokens: int) -> int:
        """fa2 keeps a partial result of every tile of a padded plan: tiles * rows of a tile * heads
        * D floats.

        Args:
            most_tokens: of an extend step whose chunks go through fa2, 0 for none.
        """
        shape = self._shape
        programs = torch.cuda.get_device_properties(self._device).multi_processor_count * 2
        decode = _tiles(self._most_rows, 16, self._most_rows, shape.group)
        tile_rows = 16 * max(programs // shape.num_kv_heads, decode)
        if most_tokens:
            chunks = _tiles(most_tokens + self._most_rows, 128, self._most_rows, shape.group)
            tile_rows = max(tile_rows, 128 * max(programs // shape.num_kv_heads, chunks))
        return tile_rows * shape.num_heads * (shape.head_dim + 1) * 4 + _INT_MARGIN

    def _plan_bytes(self, most_tokens: int) -> int:
        """Integers of the largest plan: seven per piece of work for fa3, four per tile and one per
        token for fa2.
        """
        shape, rows = self._shape, self._most_rows
        fa3 = 28 * (-(-most_tokens // 128) + rows) * shape.num_heads
        tiles = _tiles(most_tokens + rows, 16, rows, shape.group) + 1024
        fa2 = 16 * tiles + 4 * (most_tokens + 2 * rows)
        return max(fa3, fa2) + _INT_MARGIN


def chunk_wave(device: torch.device, num_heads: int, head_dim: int) -> int:
    """Tokens of one chunk whose blocks keep all multiprocessors of a GPU busy in fa3, which has a
    block for each head and 128 queries (192 in heads of 64); 1 on a CPU.

    Args:
        num_heads: this rank's.
    """
    if device.type == "cpu":
        return 1
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    tile = 192 if head_dim == 64 else 128
    return tile * max(1, programs // num_heads)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rows_of(bucket: Bucket) -> int:
    """Rows that a step of the bucket can have: each has at least one token."""
    return min(bucket.num_rows, bucket.num_tokens)


def _tiles(tokens: int, tile: int, rows: int, group: int) -> int:
    """Query tiles at most, as FlashInfer bounds them in its graph mode."""
    return -(-tokens * group // tile) + rows
