"""LM head and draw as one operator: from hidden states to one token per row, without logits in
memory where no filter asks for them.

Its implementation for a CPU, the three operators one after the other, is the reference, and what a
GPU does where the kernels of head_draw_gluon.py are not faster or cannot run. Knows nothing of
penalties, slots or several ranks, whose shares of a row must be gathered first.

Legend: L logit rows, V vocab, E hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor, library

from models.draw import draw
from models.ops.define import define
from models.ops.lm_head import lm_head
from models.ops.sampling import MIN_TEMPERATURE, filter_threshold

try:
    from models.ops import head_draw_gluon
except ImportError:  # no Triton, or another one than the kernels are written for
    head_draw_gluon = None  # type: ignore[assignment]

_HOPPER = 9


def _head_draw(
    x_LE: Tensor, weight_VE: Tensor, floats_LF: Tensor, ints_LI: Tensor, positions_L: Tensor
) -> tuple[Tensor, Tensor]:
    """One token per row, drawn from the logits x @ weight.T after top-k, top-p and min-p.

    Args:
        x_LE, weight_VE: of one dtype, contiguous.
        floats_LF: float32, its first columns are temperature, top_p and min_p.
        ints_LI: int32, its first columns are top_k and the low and the high half of the seed.
        positions_L: int32 [L]; `filter_threshold` and `draw` say what all these mean.

    Returns:
        ids int64 [L], and bool [L] whether the row's logits allow a draw.
    """
    temperature_L, top_p_L, min_p_L = floats_LF[:, :3].unbind(1)
    top_k_L, seed_lo_L, seed_hi_L = ints_LI[:, :3].unbind(1)
    logits_LV = lm_head(x_LE, weight_VE)
    threshold_L = filter_threshold(logits_LV, temperature_L, top_k_L, top_p_L, min_p_L)
    return draw(logits_LV, threshold_L, temperature_L, seed_lo_L, seed_hi_L, positions_L)


def _fake(x_LE: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    num_rows = x_LE.shape[0]
    ids_L = x_LE.new_empty((num_rows,), dtype=torch.int64)
    return ids_L, x_LE.new_empty((num_rows,), dtype=torch.bool)


head_draw = define("head_draw", _head_draw, _fake)


@library.impl("fullgraph::head_draw", "cuda")
def _head_draw_cuda(x_LE: Tensor, weight_VE: Tensor, *settings: Tensor) -> tuple[Tensor, Tensor]:
    if not _in_one(x_LE):
        return _head_draw(x_LE, weight_VE, *settings)
    out = _fake(x_LE)
    head_draw_gluon.launch(x_LE, weight_VE, settings, out, MIN_TEMPERATURE)
    return out


def _in_one(x_LE: Tensor) -> bool:
    """Whether the kernels that draw where logits are made take these rows, and are faster: so they
    are with 151,936 ids and 1,024 hidden; other sizes were not timed.
    """
    num_rows, inner = x_LE.shape
    return (
        head_draw_gluon is not None
        and x_LE.dtype == torch.bfloat16
        and head_draw_gluon.MIN_ROWS <= num_rows <= head_draw_gluon.MAX_ROWS
        and inner % head_draw_gluon.BLOCK_E == 0
        and torch.cuda.get_device_capability(x_LE.device)[0] == _HOPPER
    )
