"""What lies between two attentions as one kernel and as kernels of its parts, on a GPU.

    python -m bench.between [--after 20 350 600 850] [--equal 64 128 192] [--launches 1000]

Qwen3-0.6B's shape. Layers with attention under one graph, in turns, median of nine: microseconds a
layer for the rows that Mini-SGLang's offline workload has after so many decode steps (--after), and
for so many rows of 320 tokens (--equal); the same without attention. Before that, --launches of the
one kernel at shifting rows, cold and warm, must give the same bits each time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from bench.gpu_timing import elapsed_ms
from bench.report import command_line, percentile, save, table
from bench.workloads import mini_sglang
from engine.attention_plan import AttentionPlanner
from engine.flashinfer_plan import AttentionShape
from engine.scheduler.batch import ScheduledBatch
from engine.step_inputs import Bucket, empty_batch
from models.ops import attention_cuda, between, linear, linear_table
from models.ops.between import between_attentions
from models.ops.fused import decode_attention

HIDDEN, FFN, HEADS, KV_HEADS, DIM, PAGE = 1024, 3072, 16, 8, 128, 16
QKV = (HEADS + 2 * KV_HEADS) * DIM
EPS = 1e-6
LAYERS = 8
REPEATS = 9

Layer = dict[str, Tensor]
Tail = Callable[[Layer, Layer, Tensor, Tensor], tuple[Tensor, Tensor]]


def normal(*shape: int) -> Tensor:
    """Random bfloat16, as large as sums of so many want it."""
    scaled: Tensor = torch.randn(*shape, device="cuda") * shape[-1] ** -0.5
    return scaled.bfloat16()


def make_layers() -> list[Layer]:
    """Random weights, more than the L2 cache holds."""
    shapes = {"o": (HIDDEN, HEADS * DIM), "gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN)}
    shapes["qkv"] = (QKV, HIDDEN)
    return [
        {name: normal(*shape) for name, shape in shapes.items()}
        | {name: (torch.rand(HIDDEN, device="cuda") + 0.5).bfloat16() for name in ("pre", "post")}
        for _ in range(LAYERS)
    ]


def tail(p: Layer, then: Layer, o: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """All between a layer's attention and the next one's."""
    after = (then["pre"], then["qkv"], None)
    both: tuple[Tensor, Tensor] = between_attentions(
        o, x, p["o"], None, p["post"], p["gate_up"], None, p["down"], None, *after, EPS, True
    )
    return both


@contextmanager
def in_parts() -> Iterator[None]:
    """What is captured meanwhile takes kernels of the parts."""
    with mock.patch.dict(linear_table._BETWEEN, clear=True):
        yield


def check(layers: Sequence[Layer], launches: int) -> None:
    """The same bits from the same inputs, whatever ran before and whether caches are cold."""
    junk = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
    for rows in (33, 48, 65, 104, 129, 168, 256):
        inputs = [(normal(rows, HEADS * DIM), normal(rows, HIDDEN)) for _ in range(3)]
        first: dict[int, tuple[Tensor, Tensor]] = {}
        for i in range(launches):
            if i % 7 == 0:
                junk.zero_()
            case = i % (3 * LAYERS)
            p, then = layers[case % LAYERS], layers[(case + 1) % LAYERS]
            got = tail(p, then, *inputs[case % 3])
            expected = first.setdefault(case, got)
            assert all(map(torch.equal, got, expected)), (rows, i)


class Attention:
    """Decode attention of rows with so many tokens each, in a cache of each layer."""

    def __init__(self, lengths: Sequence[int]) -> None:
        rows = len(lengths)
        counts = [n // PAGE + 2 for n in lengths]
        columns = max(counts)
        order = iter((torch.randperm(sum(counts)) + 1).tolist())
        table_SP = np.zeros((rows + 1, columns), np.int32)
        for row, count in enumerate(counts):
            table_SP[row, :count] = [next(order) for _ in range(count)]
        size = (sum(counts) + 1, 2, PAGE, KV_HEADS, DIM)
        self.caches = [
            torch.randn(size, dtype=torch.bfloat16, device="cuda") for _ in range(LAYERS)
        ]
        starts = np.array(lengths, np.int32)
        slots = table_SP[np.arange(rows), starts // PAGE] * PAGE + starts % PAGE
        bucket = Bucket("decode", rows, rows, rows, rows, rows)
        empty = empty_batch(bucket)
        fields = {name: getattr(empty, name) for name in empty.__dataclass_fields__}
        fields |= {"row_starts": starts, "row_lens": np.ones(rows, np.int32)}
        shape = AttentionShape(HEADS, KV_HEADS, DIM, PAGE, columns, torch.bfloat16, (0,))
        self.planner = AttentionPlanner(shape, "triton", "fa3", [bucket], self.caches[0], 1 << 20)
        self.planner.plan(bucket, ScheduledBatch(**fields | {"num_decode_rows": rows}))
        arange = torch.arange(rows, dtype=torch.int32, device="cuda")
        self._where = attention_cuda.Rows(
            torch.from_numpy(table_SP).cuda(),
            arange,
            torch.from_numpy(starts).cuda(),
            torch.ones_like(arange),
            arange,
        )
        self._slots = torch.from_numpy(slots.astype(np.int32)).cuda()
        self._rope = torch.randn(rows, DIM, device="cuda")
        self._norm = torch.ones(DIM, device="cuda").bfloat16()

    def __call__(self, layer: int, qkv: Tensor) -> Tensor:
        """[rows, HEADS * DIM]."""
        heads = (self._rope, self._norm, self._norm, EPS, self.caches[layer], self._slots)
        out: Tensor = decode_attention(qkv, *heads, *self._where, DIM**-0.5, 0, True)
        return out.flatten(1)


def capture(
    layers: Sequence[Layer], attention: Attention | None, rows: int
) -> torch.cuda.CUDAGraph:
    """All layers once, one after the other."""
    x0, qkv0, o0 = normal(rows, HIDDEN), normal(rows, QKV), normal(rows, HEADS * DIM)

    def run() -> None:
        x, qkv = x0, qkv0
        for i, p in enumerate(layers):
            o = attention(i, qkv) if attention else o0
            x, qkv = tail(p, layers[(i + 1) % LAYERS], o, x)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def measure(layers: Sequence[Layer], lengths: Sequence[int]) -> dict[str, Any]:
    """Microseconds a layer, each way."""
    attention = Attention(lengths)
    rows = len(lengths)
    graphs = {}
    for name, attend in (("", attention), (" without attention", None)):
        graphs["one kernel" + name] = capture(layers, attend, rows)
        with in_parts():
            graphs["parts" + name] = capture(layers, attend, rows)
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(REPEATS):
        for name, graph in graphs.items():
            graph.replay()

            def several(graph: torch.cuda.CUDAGraph = graph) -> None:
                for _ in range(4):
                    graph.replay()

            times[name].append(elapsed_ms(several) * 1e3 / 4 / LAYERS)
    attention.planner.close()
    medians = {name: percentile(values, 50) for name, values in times.items()}
    return {"rows": rows, "tokens": sum(lengths), **medians}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; the exit status."""
    parser = command_line("between", __doc__, "between_h200")
    parser.add_argument("--after", type=int, nargs="*", default=[20, 350, 600, 850])
    parser.add_argument("--equal", type=int, nargs="*", default=[16, 32, 64, 128, 192])
    parser.add_argument("--launches", type=int, default=1000, help="of each number of rows")
    args = parser.parse_args(argv)
    torch.manual_seed(0)
    device = torch.device("cuda")
    linear.prepare(device)
    between.prepare(device)
    layers = make_layers()
    check(layers, args.launches)
    results = []
    cases = {
        f"after {n} steps": [
            len(job.prompt_ids) + n for job in mini_sglang(0) if job.num_output > n
        ]
        for n in args.after
    }
    cases |= {f"{rows} equal rows": [320] * rows for rows in args.equal}
    for name, lengths in cases.items():
        results.append({"case": name, **measure(layers, lengths)})
        save(
            args.name, {"launches with the same bits": args.launches, "rows": results}, args.results
        )
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
