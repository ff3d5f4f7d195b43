"""From step inputs to logits: page table, token feedback, embedding, layers, LM head. Traced;
mutates the state.

Built from three kinds of pieces (embed, layer, head), so that an engine may compile each alone.
Knows nothing of sampling.

Legend: T tokens, L logit rows, E hidden, D head dim, V vocab, W this rank's share of the vocab.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from models.config import ModelConfig
from models.fused_layer import (
    can_fuse,
    can_join,
    fused_decoder_layer,
    fused_qkv,
    joined_decoder_layer,
)
from models.inputs import KVCache, StepInputs, StepState, TensorParallel
from models.layers import Family, Params, Rows, decoder_layer
from models.ops.collectives import all_gather_last, all_reduce
from models.ops.linear import Kernels
from models.ops.lm_head import lm_head
from models.ops.plain import rms_norm
from models.param_spec import Tree
from models.registry import family_of

# A piece's __name__ tells it from the others of its step.
CompilePiece = Callable[[Callable[..., Any]], Callable[..., Any]]
Backbone = Callable[[Tree, KVCache, StepState, StepInputs], tuple[Tensor, Tensor | None]]
PLAIN = Kernels()


def as_is(function: Callable[..., Any]) -> Callable[..., Any]:
    """The compile_piece of one whole graph, or of none."""
    return function


def embed(
    tp: TensorParallel, params: Tree, state: StepState, inputs: StepInputs
) -> tuple[Tensor, Tensor]:
    """Apply the page-table updates, put the last drawn ids in place of -1: (x_TE, rope_TD)."""
    pages = (inputs.update_slots_U, inputs.update_columns_U)
    state.page_table_SP.index_put_(pages, inputs.update_pages_U)
    drawn_T = state.last_token_S[inputs.token_slots_T]
    # A row whose logits were not finite drew -1: any id will do, the engine has ended the request.
    ids_T = torch.where(inputs.token_ids_T < 0, drawn_T, inputs.token_ids_T).clamp(min=0)
    x_TE = vocab_embedding(tp, params["embed"], params.get("first_id"), ids_T)
    rope_TD = params["rope"][inputs.positions_T]
    # Inductor would make it anew for every layer; a view with strides has it in memory.
    return x_TE, rope_TD.as_strided(rope_TD.shape, rope_TD.stride())


def vocab_embedding(
    tp: TensorParallel, weight_WE: Tensor, first_id: Tensor | None, ids_T: Tensor
) -> Tensor:
    """[T, E]; with several ranks each looks up the ids it holds, from `first_id` on, and the sum
    has them all.
    """
    if first_id is None:
        return F.embedding(ids_T, weight_WE)
    local_T = ids_T - first_id
    held_T = (local_T >= 0) & (local_T < weight_WE.shape[0])
    x_TE = F.embedding(torch.where(held_T, local_T, 0), weight_WE)
    return all_reduce(torch.where(held_T[:, None], x_TE, 0), tp.group, tp.symmetric)


def lm_logits(
    model: ModelConfig,
    tp: TensorParallel,
    params: Tree,
    x_TE: Tensor,
    residual_TE: Tensor | None,
    inputs: StepInputs,
) -> Tensor:
    """[L, V] of the tokens whose logits are needed, on every rank; float32 on a GPU."""
    logits_LW = lm_head(*head_inputs(model, params, x_TE, residual_TE, inputs))
    return all_gather_last(logits_LW, tp.size, tp.group)[:, : model.vocab_size]


def head_inputs(
    model: ModelConfig, params: Tree, x_TE: Tensor, residual_TE: Tensor | None, inputs: StepInputs
) -> tuple[Tensor, Tensor]:
    """What the LM head multiplies: normed hidden states [L, E] and its weight [W, E]."""
    tokens_L = inputs.logit_tokens_L
    x_LE = x_TE[tokens_L]
    if residual_TE is not None:
        x_LE = x_LE + residual_TE[tokens_L]
    x_LE = rms_norm(x_LE, params["final_norm"], model.norm_eps)
    head_WE = params["embed"] if model.tie_embeddings else params["lm_head"]
    return x_LE, head_WE


def make_backbone(
    model: ModelConfig,
    tp: TensorParallel,
    kind: str,
    compile_piece: CompilePiece = as_is,
    kernels: Kernels = PLAIN,
) -> Backbone:
    """(params, kv_cache, state, inputs) -> (x_TE, residual_TE or None) after all layers.

    Their sum is the hidden state.

    Args:
        model: the configuration.
        tp: this rank's place.
        kind: "decode" or "extend".
        compile_piece: applied once to the embedding and once to a layer of each window, dense and
            of experts apart; where layers compute the next one's qkv, the last is apart, too.
        kernels: `fused` makes steps of fused operators, decode layers whole where the family's
            layers allow it.
    """
    family = family_of(model.architecture)
    fused = kernels.fused and kind == "decode" and can_fuse(family)
    if fused and can_join(model, tp):
        return _joined_backbone(model, tp, compile_piece, kernels)
    embed_piece = compile_piece(_embed_piece(tp))
    mixes = model.moe_layers or (False,) * model.num_layers
    layer_kinds = list(zip(model.layer_windows, mixes, strict=True))
    layer_pieces = {
        layer_kind: compile_piece(
            _fused_layer_piece(model, tp, *layer_kind, kernels)
            if fused
            else _layer_piece(model, family, tp, *layer_kind, kind, kernels)
        )
        for layer_kind in sorted(set(layer_kinds))
    }

    def backbone(
        params: Tree, kv_cache: KVCache, state: StepState, inputs: StepInputs
    ) -> tuple[Tensor, Tensor | None]:
        x_TE, rope_TD = embed_piece(params, state, inputs)
        residual_TE = None if fused else torch.zeros_like(x_TE)
        rows = _rows(state, inputs)
        for p, kv_layer, layer_kind in zip(
            params["layers"], kv_cache.layers, layer_kinds, strict=True
        ):
            layer = layer_pieces[layer_kind]
            if fused:
                x_TE = layer(p, x_TE, rope_TD, kv_layer, rows)
            else:
                x_TE, residual_TE = layer(p, x_TE, residual_TE, rope_TD, kv_layer, rows)
        return x_TE, residual_TE

    return backbone


def _rows(state: StepState, inputs: StepInputs) -> Rows:
    return Rows(
        inputs.kv_slots_T,
        state.page_table_SP,
        inputs.row_slots_R,
        inputs.row_starts_R,
        inputs.row_lens_R,
        inputs.row_offsets_R,
    )


def _joined_backbone(
    model: ModelConfig, tp: TensorParallel, compile_piece: CompilePiece, kernels: Kernels
) -> Backbone:
    """`make_backbone` of fused layers each of which computes the next one's qkv."""

    def embed_qkv_step(
        params: Tree, state: StepState, inputs: StepInputs
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_TE, rope_TD = embed(tp, params, state, inputs)
        return x_TE, fused_qkv(model, kernels, params["layers"][0], x_TE), rope_TD

    embed_piece = compile_piece(embed_qkv_step)
    # The last one computes no qkv.
    layer_kinds = [(window, False) for window in model.layer_windows[:-1]]
    layer_kinds.append((model.layer_windows[-1], True))
    layer_pieces = {
        layer_kind: compile_piece(_joined_layer_piece(model, *layer_kind, kernels))
        for layer_kind in sorted(set(layer_kinds))
    }

    def backbone(
        params: Tree, kv_cache: KVCache, state: StepState, inputs: StepInputs
    ) -> tuple[Tensor, Tensor | None]:
        x_TE, qkv_TQ, rope_TD = embed_piece(params, state, inputs)
        rows = _rows(state, inputs)
        layers = params["layers"]
        for p, following, kv_layer, layer_kind in zip(
            layers, [*layers[1:], None], kv_cache.layers, layer_kinds, strict=True
        ):
            layer = layer_pieces[layer_kind]
            x_TE, qkv_TQ = layer(p, following, x_TE, qkv_TQ, rope_TD, kv_layer, rows)
        return x_TE, None

    return backbone


def _joined_layer_piece(
    model: ModelConfig, window: int, last: bool, kernels: Kernels
) -> Callable[..., tuple[Tensor, Tensor]]:
    def joined_layer_step(*tensors: Any) -> tuple[Tensor, Tensor]:
        return joined_decoder_layer(model, window, kernels, *tensors)

    joined_layer_step.__name__ += f"_{window}_last" if last else f"_{window}"
    return joined_layer_step


def _embed_piece(tp: TensorParallel) -> Callable[..., tuple[Tensor, Tensor]]:
    def embed_step(params: Tree, state: StepState, inputs: StepInputs) -> tuple[Tensor, Tensor]:
        return embed(tp, params, state, inputs)

    return embed_step


def _fused_layer_piece(
    model: ModelConfig, tp: TensorParallel, window: int, mixes: bool, kernels: Kernels
) -> Callable[..., Tensor]:
    def fused_layer_step(
        p: Params, x_TE: Tensor, rope_TD: Tensor, kv_layer: Tensor, rows: Rows
    ) -> Tensor:
        return fused_decoder_layer(model, tp, window, kernels, p, x_TE, rope_TD, kv_layer, rows)

    fused_layer_step.__name__ += _suffix(window, mixes)
    return fused_layer_step


def _layer_piece(
    model: ModelConfig,
    family: Family,
    tp: TensorParallel,
    window: int,
    mixes: bool,
    kind: str,
    kernels: Kernels,
) -> Callable[..., tuple[Tensor, Tensor]]:
    def layer_step(
        p: Params,
        x_TE: Tensor,
        residual_TE: Tensor,
        rope_TD: Tensor,
        kv_layer: Tensor,
        rows: Rows,
    ) -> tuple[Tensor, Tensor]:
        return decoder_layer(
            model, family, tp, window, kind, kernels, p, x_TE, residual_TE, rope_TD, kv_layer, rows
        )

    layer_step.__name__ += _suffix(window, mixes)
    return layer_step


def _suffix(window: int, mixes: bool) -> str:
    return f"_{window}_experts" if mixes else f"_{window}"
