"""How the programs of one launch wait for each other: a counter that each adds to, in Gluon.

What a program wrote before it arrives, every program that has met may read, by loads past the
multiprocessor's own cache and by tensor copies (TMA). All of them must be resident at once.

Knows nothing of what they compute. Importing it needs Triton.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def counted(counter_ptr):
    """The counter as it is now."""
    return gl.inline_asm_elementwise(
        "ld.relaxed.gpu.global.s32 $0, [$1];", "=r,l", [counter_ptr], gl.int32, False, 1
    )


@gluon.jit
def arrive(counter_ptr):
    """This program's part is done; by all threads that had one, the program's first among them."""
    fence()
    gl.thread_barrier()
    # By one thread, behind all that the others wrote before the barrier.
    gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first red.release.gpu.global.add.u32 [$1], 1;
        mov.u32 $0, 0;
        }""",
        "=r,l",
        [counter_ptr],
        gl.int32,
        False,
        1,
    )


@gluon.jit
def meet(counter_ptr, target):
    """Wait until the counter is there. It only grows, past the sign, too."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred less;
        .reg .s32 seen;
        again:
        ld.acquire.gpu.global.s32 seen, [$1];
        sub.s32 seen, seen, $2;
        setp.lt.s32 less, seen, 0;
        @less bra again;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [counter_ptr, target],
        gl.int32,
        False,
        1,
    )
    fence()


@gluon.jit
def fence():
    """Stores to global memory before it and tensor copies from there after it, in this order.

    A fence for shared memory, too, would wait for all memory: a microsecond.
    """
    gl.inline_asm_elementwise(
        "fence.proxy.async.global; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1
    )
