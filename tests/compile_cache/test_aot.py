"""Functions compiled in one process and loaded in another: no Dynamo, no compiler, the same
numbers.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from compile_cache.aot import AotFunction, compile_or_load  # noqa: E402
from compile_cache.fingerprint import Fingerprint  # noqa: E402
from compile_cache.store import Store  # noqa: E402
from tests.compile_cache.toy_step import Shape, make_inputs, make_step, make_tensors  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
HERE = Fingerprint({"torch": torch.__version__})
SHAPE = Shape()
# One process: open, compile or load, run at three sizes, compare with eager, seal, print what
# happened.
PROGRAM = """
import json, os, sys
from pathlib import Path
from compile_cache.store import Store
from compile_cache.fingerprint import Fingerprint
root, device, pages = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
cuda = device == "cuda"
def warn(message): print("WARN", message)
with Store(root, warn).open(Fingerprint({"n": 1})) as session:
    os.environ.update(session.environment())
    import torch
    from compile_cache.aot import compile_or_load
    from tests.compile_cache.toy_step import *
    shape = Shape()
    params, cache = make_tensors(shape, pages, device)
    inputs = {n: make_inputs(shape, n, device) for n in (8, 5, 13)}
    def mark():
        for layer in cache.layers:
            torch._dynamo.mark_dynamic(layer, 0)
        for tensor in inputs[8]:
            torch._dynamo.mark_dynamic(tensor, 0)
        for tensor in [*params["layers"], *cache.layers, *(t for i in inputs.values() for t in i)]:
            torch._dynamo.mark_static_address(tensor, guard=False)
    step = make_step(shape)
    equal, accepted = [], []
    with torch.no_grad():
        f = compile_or_load(step, (params, cache, inputs[8]), session, "step", mark=mark,
                            cudagraphs=cuda, warn=warn)
        for n in (8, 5, 13, 5):
            accepted.append(f.accepts(params, cache, inputs[n]))
            for _ in range(3 if cuda else 1):
                _, other = make_tensors(shape, pages, device)
                for ours, theirs in zip(cache.layers, other.layers): ours.copy_(theirs)
                if cuda: torch.compiler.cudagraph_mark_step_begin()
                out = f(params, cache, inputs[n]).sum_TE.clone()
            want = step(params, other, inputs[n]).sum_TE
            equal.append(bool(torch.allclose(out, want, atol=1e-5))
                         and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(cache.layers,
                         other.layers)))
    wrong = make_inputs(Shape(hidden=32), 8, device)
    counters = torch._dynamo.utils.counters
    skips = counters["inductor"]["cudagraph_skips"]
    recorded = torch._inductor.cudagraph_trees.get_manager(0).new_graph_id().id if cuda else None
    print(json.dumps({
        "loaded": f.loaded, "equal": equal, "accepted": accepted,
        "refused": not f.accepts(params, cache, wrong),
        "frames": sum(counters["frames"].values()) + counters["stats"]["unique_graphs"],
        "skips": skips, "recorded": recorded,
        "compiler": "torch._inductor.compile_fx" in sys.modules,
        "sealed": session.seal(),
    }))
"""


def run(root: Path, device: str, pages: int) -> dict[str, object]:
    import json

    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root), device, str(pages)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        # No vector instructions: probing them would take most of the time.
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_VEC_ISA_OK": "0"},
        timeout=280,
    )
    assert result.returncode == 0, result.stderr
    assert "WARN" not in result.stdout, result.stdout
    answer: dict[str, object] = json.loads(result.stdout.splitlines()[-1])
    return answer


def check(answer: dict[str, object], loaded: bool) -> None:
    assert answer["loaded"] is loaded
    assert answer["equal"] == [True] * 4
    assert answer["accepted"] == [True] * 4
    assert answer["refused"]
    assert (answer["frames"] == 0) is loaded
    assert answer["sealed"]


@pytest.mark.slow
def test_a_second_process_with_other_memory_loads_what_the_first_compiled(tmp_path: Path) -> None:
    check(run(tmp_path, "cpu", 64), loaded=False)
    answer = run(tmp_path, "cpu", 100)
    check(answer, loaded=True)
    assert not answer["compiler"]


@pytest.mark.gpu
def test_reduce_overhead_records_what_was_loaded(tmp_path: Path) -> None:
    """On a GPU the loaded function must go through CUDA graph trees, with nothing skipped."""
    for loaded, pages in ((False, 64), (True, 100)):
        answer = run(tmp_path, "cuda", pages)
        check(answer, loaded)
        assert answer["skips"] == 0
        assert isinstance(answer["recorded"], int) and answer["recorded"] >= 3


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, from its inside
def test_a_blob_that_is_no_function_is_built_again_and_one_that_cannot_be_kept_still_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._dynamo.aot_compile import AOTCompiledFunction

    def refuse(*_: object) -> None:
        raise RuntimeError("Failed to serialize\nmore")

    monkeypatch.setattr(AOTCompiledFunction, "serialize", refuse)
    warned: list[str] = []
    params, cache = make_tensors(SHAPE, 8, "cpu")
    inputs = make_inputs(SHAPE, 8, "cpu")
    with Store(tmp_path, warned.append).open(HERE) as session:
        session.put("aot/step", b"garbage")
        function = compile_or_load(
            make_step(SHAPE), (params, cache, inputs), session, "step", warn=warned.append,
            options={"cpp.vec_isa_ok": False},
        )  # fmt: skip
    assert not isinstance(function, AotFunction)
    assert len(warned) == 2
    assert "cannot be loaded and is built again (UnpicklingError" in warned[0]
    assert "cannot be kept" in warned[1] and warned[1].endswith("Failed to serialize)")


def test_preload_imports_all_of_torch_that_a_load_needs() -> None:
    code = (
        "import sys; from compile_cache.aot import _MODULES, preload; preload()\n"
        "print([name for name in _MODULES if name not in sys.modules])\n"
        "print('torch._dynamo.backends.inductor' in sys.modules)"  # it starts a pool of compilers
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == ["[]", "False"]


def test_a_tensor_that_would_become_a_constant_is_our_bug(tmp_path: Path) -> None:
    params, cache = make_tensors(SHAPE, 8, "cpu")
    args = (params, cache, make_inputs(SHAPE, 8, "cpu"))
    torch._dynamo.mark_static_address(cache.layers[0], guard=True)
    with (
        Store(tmp_path, print).open(HERE) as session,
        pytest.raises(AssertionError, match="guard=True"),
    ):
        compile_or_load(make_step(SHAPE), args, session, "step", warn=print)
