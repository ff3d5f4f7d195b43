"""All-reduce of decode-size messages inside a CUDA graph, in microseconds a call.

    python -m bench.all_reduce [--size 2] [--hidden 5120] [--rows 1 8 64] [--results FOLDER]

NCCL, torch's symmetric memory (one-shot, two-shot) and our own kernel (models/ops/symmetric.py),
every one checked against the sum first. Spawns a process per GPU.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from bench.report import command_line, save, table
from bench.server_process import free_port
from models.ops import symmetric

CALLS, REPLAYS = 40, 20
ROWS = (1, 4, 8, 16, 32, 64, 128, 200, 256)
Call = Callable[[], Tensor]


def candidates(x: Tensor, residual: Tensor, shared: Tensor, group: str) -> dict[str, Call]:
    """Name -> a call that sums x over the ranks; those of "+ add" also add the residual.

    `shared` is symmetric memory of x's shape that holds x.
    """
    functional: Any = torch.ops._c10d_functional
    ops: Any = torch.ops.symm_mem

    def nccl() -> Tensor:
        return functional.wait_tensor(functional.all_reduce(x, "sum", group))  # type: ignore[no-any-return]

    def two_shot() -> Tensor:
        shared.copy_(x)
        return ops.two_shot_all_reduce_(shared, "sum", group)  # type: ignore[no-any-return]

    def one_shot() -> Tensor:
        shared.copy_(x)
        return ops.one_shot_all_reduce(shared, "sum", group)  # type: ignore[no-any-return]

    calls: dict[str, Call] = {
        "NCCL": nccl,
        "NCCL + add": lambda: residual + nccl(),
        "copy, one-shot": one_shot,
        "one-shot, copying": lambda: ops.one_shot_all_reduce_copy(shared, x, "sum", group),
        "copy, two-shot": two_shot,
        "ours": lambda: symmetric.all_reduce_add(x, None, group),
        "ours + add": lambda: symmetric.all_reduce_add(x, residual, group),
    }
    return calls


def replay_us(call: Call) -> float:
    """Microseconds of a call in a graph of many, the least of some replays."""
    call()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    times: list[float] = []
    for _ in range(REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end) / CALLS)
    del graph
    return min(times)


def measure(rank: int, size: int, hidden: int, rows: int, group: str) -> dict[str, Any]:
    """One row of the table: microseconds by candidate, or what went wrong."""
    device = torch.device("cuda", rank)
    parts = [_draw(rows, hidden, seed) for seed in range(size + 1)]
    x, residual = parts[rank].to(device), parts[size].to(device)
    memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
    shared = memory.empty(x.shape, dtype=x.dtype, device=device)
    memory.rendezvous(shared, group)
    shared.copy_(x)
    total = torch.stack(parts[:size]).float().sum(0)
    row: dict[str, Any] = {"rows": rows, "KiB": x.nbytes / 1024}
    for name, call in candidates(x, residual, shared, group).items():
        expected = total + parts[size].float() if name.endswith("add") else total
        try:
            shared.copy_(x)
            error = (call().cpu().float() - expected).abs().max().item()
            row[name] = replay_us(call) if error < 0.1 else f"wrong by {error:.3g}"
        except RuntimeError as problem:  # of this torch: it lacks the operator, say
            row[name] = str(problem).splitlines()[0][:40]
    return row


def _draw(rows: int, hidden: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, hidden, generator=generator).bfloat16()


def run_rank(rank: int, size: int, port: int, hidden: int, rows: Sequence[int], path: str) -> None:
    """One rank of the measurement; rank 0 prints and saves."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=size,
        device_id=device,
    )
    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    symmetric.share(group, rank, size, device)
    result = [measure(rank, size, hidden, n, group) for n in rows]
    if rank == 0:
        print(table(result), flush=True)
        folder, name = os.path.split(path)
        save(name, {"ranks": size, "hidden": hidden, "us": result}, Path(folder))
    symmetric.forget(group)
    torch.cuda.synchronize()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Measure."""
    parser = command_line("all_reduce", __doc__, "all_reduce")
    parser.add_argument("--size", type=int, default=2, help="ranks, one GPU each")
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    args = parser.parse_args()
    if args.size > torch.cuda.device_count():
        parser.error(f"{args.size} ranks need as many GPUs")
    shape = (args.size, free_port(), args.hidden, args.rows, str(args.results / args.name))
    spawn(run_rank, shape, nprocs=args.size)


if __name__ == "__main__":
    main()
