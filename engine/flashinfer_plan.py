"""FlashInfer on the host: its modules, and the plan of one of its calls.

FlashInfer decides on the host how a step's rows are cut over the multiprocessors and sends that as
a few KB of integers. Its `plan()` is called on the compiled module itself, for the wrapper's would
also copy page lists, which we make on the device, and cost several times as much. That ties us to
one version of FlashInfer, which is checked.

Knows nothing of buckets or of which kernels a step uses.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from compile_cache.session import Session
from engine.errors import ConfigError
from engine.scheduler.batch import I32, ScheduledBatch

logger = logging.getLogger(__name__)

FLASHINFER = "0.6.13"


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
        starts / lens: of all rows. num_decode: rows at the front with one token (a prompt's last
            token may be one).
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
    """Where plans of one role and window go: integers on the device, and two staging buffers that
    alternate.

    Buckets share it, for a bucket is planned before each of its steps. A staging buffer is written
    again only when its copy two plans ago is done.
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
        # fa2 chooses its tile for the longest row that leaves every other row a token; here rows
        # may be empty, so the longest has all tokens.
        bound = num_tokens + num_rows - 1 if self._fa2 and chunks else num_tokens
        tail = [bound, num_rows, shape.num_heads, shape.num_kv_heads, shape.page_size, True]
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
        # To fa2, which reads the offsets on the device, the decode rows are one row of no keys, the
        # last of them: a tile of each would use up the tiles among which it splits keys. fa3 takes
        # ours and skips them.
        self._qo_indptr[:n] = 0 if self._fa2 else n
        self._qo_indptr[n] = n
        np.cumsum(rows.lens[n:], out=self._qo_indptr[n + 1 : used + 1])
        self._qo_indptr[n + 1 : used + 1] += n
        self._qo_indptr[used + 1 :] = self._qo_indptr[used]


def flashinfer(module: str) -> Any:
    """A module of FlashInfer's; ConfigError says what to install if it is missing or of another
    version.
    """
    install = f"pip install flashinfer-python=={FLASHINFER} (or fullgraph[cuda])"
    try:
        package = importlib.import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(
            f"attention: FlashInfer is needed on a GPU: {install} ({error})"
        ) from error
    if package.__version__ != FLASHINFER:
        raise ConfigError(
            f"attention: FlashInfer {package.__version__} is installed, "
            f"{FLASHINFER} is needed: {install}"
        )
    return importlib.import_module(f"flashinfer.{module}")


def load_module(name: str, make_spec: Callable[[], Any], keeper: Session | None) -> Any:
    """A kernel module. One that was kept is loaded without FlashInfer, whose import takes seconds.

    Args:
        name: says what the module was built for.
        make_spec: FlashInfer's description of it; called where nothing was kept.
        keeper: of built modules.
    """
    blob = f"flashinfer/{name}.so"
    kept = keeper.path(blob) if keeper is not None else None
    if kept is not None:
        return importlib.import_module("tvm_ffi").load_module(str(kept))
    spec = make_spec()
    # Without a built one that is minutes of nvcc, so say so first.
    logger.info("FlashInfer module %s (built on first use, which takes minutes)", spec.name)
    module = spec.build_and_load()
    if keeper is not None:
        keeper.put(blob, spec.get_library_path().read_bytes())
    return module


def xqa_call(module: Any) -> Callable[..., None]:
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
