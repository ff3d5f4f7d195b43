"""A process that compiles: jobs in, artefacts into the compile cache, a line out for each job.

    python -m engine.compile_process --parent PID JOB... < configuration as JSON

It needs neither weights nor pages: its parameters all lie in one piece of memory, as large as the
largest, whose values nobody reads for their own sake. It may run beside an engine that loads, and
several may share out the jobs of one entry: each job is kept as soon as it is done. Knows nothing
of what the engine does with the artefacts.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import signal
import sys
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from compile_cache.session import Session
from compile_cache.warmup import Job, run_jobs
from engine.artefacts import Prepared, open_cache, prepare
from engine.compile_jobs import VARIANTS, CompileJob, compile_jobs
from engine.config import EngineConfig
from engine.graph_programs import StepTensors
from engine.graph_runner import GraphRunner
from engine.parent_guard import die_with_parent
from engine.resolve import ResolvedConfig
from engine.step_compiler import Setup, build_runner
from engine.worker import configure_threads, kv_pages, step_state
from engine.world import launched_rank
from models.inputs import TensorParallel
from models.ops import symmetric
from models.weights import hollow_params

# Pages of a hollow engine: the number is symbolic in whatever is compiled.
_PAGES = 16


def main(argv: Sequence[str] | None = None) -> int:
    """Compile the named jobs; the exit status."""
    parser = argparse.ArgumentParser(prog="engine.compile_process")
    parser.add_argument("--parent", type=int, default=os.getppid())
    parser.add_argument("--nice", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0, help="of Inductor's own compilers")
    parser.add_argument("jobs", nargs="+")
    args = parser.parse_args(argv)
    die_with_parent(args.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.nice(args.nice)
    config = EngineConfig.model_validate_json(sys.stdin.read())
    if args.threads:
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(args.threads)
    prepared = prepare(config)
    with open_cache(prepared) as session:
        hollow = _Hollow(prepared, session)

        def run(job: CompileJob) -> None:
            session.refresh()  # kernels that others have built meanwhile
            hollow.run(job)

        wanted = [job for group in compile_jobs(prepared.config, VARIANTS) for job in group]
        jobs = [
            Job(job.name, functools.partial(run, job)) for job in wanted if job.name in args.jobs
        ]
        assert len(jobs) == len(args.jobs), (args.jobs, [job.name for job in wanted])
        kept = run_jobs(jobs, session, _tell)
        hollow.close()
    return 0 if kept else 1


class _Hollow:
    """A runner over parameters without values, for one GPU, compiled or not; another one where the
    next job needs it.
    """

    def __init__(self, prepared: Prepared, session: Session) -> None:
        self._prepared, self._session = prepared, session
        self._tp = _pretended_ranks(prepared.config)
        self._runner: GraphRunner | None = None
        self._kind: tuple[int, bool] | None = None
        configure_threads(prepared.config)

    def run(self, job: CompileJob) -> None:
        """Do one job."""
        if self._runner is None or self._kind != (job.gpu, job.compiled):
            self.close()  # two runners would share what is the process's own
            self._runner, self._kind = self._build(job), (job.gpu, job.compiled)
        for size in job.buckets:
            self._runner.warm_bucket(job.kind, size, job.variant)

    def close(self) -> None:
        """Free the runner."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _build(self, job: CompileJob) -> GraphRunner:
        config, model = self._prepared.config, self._prepared.model
        device = torch.device(config.device)
        if device.type == "cuda":
            torch.cuda.set_device(job.gpu)
            device = torch.device("cuda", job.gpu)
        setup = Setup(config, model, self._tp, device, self._session)
        sizes = (setup.dtype, device, config.model.max_model_len)
        params = hollow_params(model, self._tp, *sizes)
        tensors = StepTensors(params, kv_pages(setup, _PAGES), *step_state(setup))
        return build_runner(setup, tensors, compiles=job.compiled, records=False)


def _pretended_ranks(config: ResolvedConfig) -> TensorParallel:
    """A place among ranks that are not there: collectives can be traced, and give nonsense."""
    size = config.parallel.tp
    if size == 1 and launched_rank() is None:
        return TensorParallel()
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # registers it
    dist.init_process_group("fake", store=HashStore(), rank=0, world_size=size)
    assert dist.group.WORLD is not None
    group, shares = dist.group.WORLD.group_name, config.parallel.all_reduce == "symmetric"
    if shares:
        symmetric.pretend(group)
    return TensorParallel(0, size, group, shares)


def _tell(name: str, seconds: float) -> None:
    """A line for the parent after each job."""
    print(json.dumps([name, seconds]), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    sys.exit(main())
