"""Operators between the fused projection and the output projection, each in one kernel on a GPU.

qk_norm_rope_kv_write ends before attention; decode_attention is the same with the attention of a
decode step, and has its CUDA implementation in attention_cuda.py. The CPU implementations are the
references. Knows nothing of layers.

Legend: T tokens, H query heads, K kv heads, D head dim.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, library

from models.ops.attention import paged_attention
from models.ops.kv_write import kv_write
from models.ops.plain import apply_rope, rms_norm

try:
    from models.ops import fused_triton
except ImportError:  # no Triton: a CPU
    fused_triton = None  # type: ignore[assignment]


@library.custom_op(
    "fullgraph::qk_norm_rope_kv_write", mutates_args=("kv_layer",), device_types="cpu"
)
def qk_norm_rope_kv_write(
    qkv: Tensor,
    rope_TD: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_layer: Tensor,
    kv_slots_T: Tensor,
    pdl: bool,
) -> Tensor:
    """Split the projection into heads, norm and rotate queries and keys, write keys and values to
    their pages.

    Args:
        qkv: [T, (H + 2 K) * D]: queries, keys, values; contiguous.
        rope_TD: float32 [T, D]: cosines, then sines, of the token's position.
        q_norm / k_norm: [D] weights of an RMS norm over each head, both or neither.
        kv_layer: [pages, 2, page_size, K, D], contiguous; mutated.
        kv_slots_T: int32 [T]: page * page_size + offset; -1 is not written.
        pdl: programmatic dependent launch; no effect on a CPU.

    Returns:
        q_THD: [T, H, D], contiguous.
    """
    sizes = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    q_THD, k_TKD, v_TKD = (part.unflatten(1, (-1, head_dim)) for part in qkv.split(sizes, -1))
    if q_norm is not None and k_norm is not None:
        q_THD, k_TKD = rms_norm(q_THD, q_norm, eps), rms_norm(k_TKD, k_norm, eps)
    kv_write(apply_rope(k_TKD, rope_TD), v_TKD, kv_layer, kv_slots_T)
    return apply_rope(q_THD, rope_TD)


@qk_norm_rope_kv_write.register_fake
def _(
    qkv: Tensor, _rope: Any, _q_norm: Any, _k_norm: Any, _eps: float, num_heads: int,
    _num_kv_heads: int, head_dim: int, *_: Any,
) -> Tensor:  # fmt: skip
    return qkv.new_empty((qkv.shape[0], num_heads, head_dim))


if fused_triton is not None:
    qk_norm_rope_kv_write.register_kernel("cuda", fused_triton.heads)


@library.custom_op("fullgraph::decode_attention", mutates_args=("kv_layer",), device_types="cpu")
def decode_attention(
    qkv: Tensor,
    rope_TD: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    kv_layer: Tensor,
    kv_slots_T: Tensor,
    page_table_SP: Tensor,
    row_slots_R: Tensor,
    row_starts_R: Tensor,
    row_lens_R: Tensor,
    row_offsets_R: Tensor,
    scale: float,
    window: int,
    pdl: bool,
) -> Tensor:
    """`qk_norm_rope_kv_write`, then `paged_attention` of a decode step: token r is row r. [T, H,
    D], contiguous.

    The numbers of heads follow from the shapes of `qkv` and `kv_layer`.
    """
    num_kv_heads, head_dim = kv_layer.shape[3:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q_THD = qk_norm_rope_kv_write(
        qkv,
        rope_TD,
        q_norm,
        k_norm,
        eps,
        num_heads,
        num_kv_heads,
        head_dim,
        kv_layer,
        kv_slots_T,
        pdl,
    )
    return paged_attention(
        q_THD,
        kv_layer,
        page_table_SP,
        row_slots_R,
        row_starts_R,
        row_lens_R,
        row_offsets_R,
        scale,
        window,
        "decode",
    )


@decode_attention.register_fake
def _(
    qkv: Tensor, _rope: Any, _q_norm: Any, _k_norm: Any, _eps: float, kv_layer: Tensor, *_: Any
) -> Tensor:
    num_kv_heads, head_dim = kv_layer.shape[3:]
    return qkv.new_empty((qkv.shape[0], qkv.shape[1] // head_dim - 2 * num_kv_heads, head_dim))
