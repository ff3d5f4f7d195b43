"""Host time of a step over DTensor parameters and over a rank's own shards.

    python -m bench.sharded_params [--layers 28] [--size 2] [--results FOLDER]

The matrices of a decode step (four a layer, all-reduced where their
inputs are split), so small that the host is all there is to time. The process group is torch's
fake one, whose collectives return at once: what is left is what each way of holding parameters
costs in Python and in the dispatcher. Milliseconds, medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.report import command_line, save, table
from models.ops.collectives import all_reduce

HIDDEN = 64
# Of each matrix: rows, columns, the dim that is split among the ranks.
MATRICES = (
    (HIDDEN, HIDDEN, 0),
    (HIDDEN, HIDDEN, 1),
    (4 * HIDDEN, HIDDEN, 0),
    (HIDDEN, 4 * HIDDEN, 1),
)
ROUNDS, CALLS = 7, 30


def weights(layers: int) -> list[Tensor]:
    """All layers' matrices, whole."""
    return [torch.randn(n, k) * k**-0.5 for _ in range(layers) for n, k, _ in MATRICES]


def dtensor_step(x: Any, params: Sequence[Any]) -> Any:
    """Placements say which sums are partial; redistribute is the all-reduce."""
    replicated = [Replicate()]
    for i in range(0, len(params), 4):
        y: Any = F.linear(F.linear(x, params[i]), params[i + 1])
        x = x + y.redistribute(placements=replicated)
        y = F.linear(F.silu(F.linear(x, params[i + 2])), params[i + 3])
        x = x + y.redistribute(placements=replicated)
    return x


def shard_step(x: Tensor, params: Sequence[Tensor], size: int, group: str) -> Tensor:
    """The same with each all-reduce written down."""
    for i in range(0, len(params), 4):
        y = F.linear(F.linear(x, params[i]), params[i + 1])
        x = x + all_reduce(y, group)
        y = F.linear(F.silu(F.linear(x, params[i + 2])), params[i + 3])
        x = x + all_reduce(y, group)
    return x


def timed(step: Callable[[], Any]) -> dict[str, float]:
    """The first call, and the median of later ones."""
    begin = time.perf_counter()
    step()
    first = time.perf_counter() - begin
    rounds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(CALLS):
            step()
        rounds.append((time.perf_counter() - begin) / CALLS)
    return {"first_s": first, "ms": 1e3 * statistics.median(rounds)}


def main() -> None:
    """Both ways, eager and compiled."""
    parser = command_line("sharded_params", __doc__, "sharded_params")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--size", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.size)
    torch.set_num_threads(1)
    mesh: DeviceMesh = init_device_mesh("cpu", (args.size,))
    whole = weights(args.layers)
    dims = [dim for _ in range(args.layers) for _, _, dim in MATRICES]
    spread = [distribute_tensor(w, mesh, [Shard(d)]) for w, d in zip(whole, dims, strict=True)]
    shards = [param.to_local().contiguous() for param in spread]
    x = torch.randn(1, HIDDEN)
    everywhere = distribute_tensor(x, mesh, [Replicate()])
    group = mesh.get_group().group_name
    rows = []
    with torch.inference_mode():
        for compiled in (False, True):
            wrap: Any = torch.compile(fullgraph=True) if compiled else lambda function: function
            by_dtensor, by_shard = wrap(dtensor_step), wrap(shard_step)
            ways = {
                "DTensor": lambda f=by_dtensor: f(everywhere, spread),
                "own shards": lambda f=by_shard: f(x, shards, args.size, group),
            }
            for name, step in ways.items():
                rows.append({"parameters": name, "compiled": compiled, **timed(step)})
    print(table(rows))
    print(save(args.name, {"layers": args.layers, "rows": rows}, args.results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
