"""What steps take of a GPU's memory besides weights, state and pages: measured by running the
largest of them.

Few layers, uncompiled, over two pages: a step frees one layer's memory before the next, and
compiled code keeps no more than this does. The outcome is kept in the compile cache, so that later
starts try nothing. Knows nothing of what is served with the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from engine.graph_programs import StepTensors
from engine.resolve import ResolvedConfig
from engine.step_compiler import Setup, build_runner, few_layers

# What the driver keeps of a graph of some hundred kernels, and loads of kernels.
_GRAPH_BYTES = 3 << 20
_KERNEL_BYTES = 256 << 20
_NOTE = "step_bytes"


def step_bytes(
    setup: Setup,
    tensors: Callable[[int], StepTensors],
    gather: Callable[[str, int], Sequence[int]],
) -> int:
    """Bytes for attention's workspaces, the activations of the largest steps and all graphs. What
    was measured is noted in the session.

    Activations count twice: graphs keep theirs in a pool of their own, beside the one of what runs
    before a graph is recorded.

    Args:
        tensors: makes them, with so many KV pages.
        gather: Ranks.gather; ranks run the steps together or not at all.
    """
    config, session = setup.config, setup.session
    # What the entry of the cache does not depend on.
    facts = [config.scheduler.max_running, config.model.max_model_len, config.kv.page_size]
    facts += [int(config.attention.workspace), setup.tp.size]
    note = session.manifest.notes.get(_NOTE)
    known = int(note["bytes"]) if isinstance(note, dict) and note.get("facts") == facts else 0
    if min(gather("known step memory", known)) > 0:
        return known
    workspaces, activations = _run(replace(setup, config=_largest(config)), tensors(2))
    compile_ = config.compile
    num_graphs = 2 * (len(compile_.decode_buckets) + len(compile_.extend_buckets))
    total = workspaces + 2 * activations + num_graphs * _GRAPH_BYTES + _KERNEL_BYTES
    session.note(_NOTE, {"facts": facts, "bytes": total})
    return total


def _largest(config: ResolvedConfig) -> ResolvedConfig:
    """The same with the largest bucket of each kind alone."""
    compile_ = config.compile
    buckets = {
        "decode_buckets": compile_.decode_buckets[-1:],
        "extend_buckets": compile_.extend_buckets[-1:],
    }
    return config.model_copy(update={"compile": compile_.model_copy(update=buckets)})


def _run(setup: Setup, tensors: StepTensors) -> tuple[int, int]:
    """Bytes of workspaces, and the most that a step took on top."""
    device, options = setup.device, setup.config.compile
    few_model, few = few_layers(setup.model, tensors)
    before = torch.cuda.memory_allocated(device)
    runner = build_runner(replace(setup, model=few_model), few, compiles=False)
    ready = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    # Of the variants `full` has every tensor that `plain` has.
    runner.warm_bucket("extend", options.extend_buckets[-1], "full")
    runner.warm_bucket("decode", options.decode_buckets[-1], "full")
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device)
    runner.close()
    return ready - before, peak - ready
