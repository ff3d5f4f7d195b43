"""What a graph takes and gives. Every tensor that a step reads or writes is a field here; nothing
is global.

Legend: T tokens of the step, R rows (requests in it), L logit rows, U page-table updates, S slots
(+ 1 dummy, the last), P pages of one sequence at most, V vocab. Padding is described per field; it
never changes a real row.

Knows nothing of how a batch is scheduled or how the buffers reach the device.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KVCache(NamedTuple):
    """Keys and values of all pages. `layers[i]`: [pages, 2, page_size, kv_heads, head_dim], static
    address.

    Page 0 is the dummy page: never written, always zero, read by padded rows.
    """

    layers: tuple[Tensor, ...]


class StepState(NamedTuple):
    """State that lives on the device across steps and that a step mutates. Row S is a dummy for
    padding.

    page_table_SP: int32 [S + 1, P]; last_token_S: int32 [S + 1], the last token drawn for the slot.
    """

    page_table_SP: Tensor
    last_token_S: Tensor


class SamplingState(NamedTuple):
    """Per-slot state of the `full` variant, set at admission, mutated by a step.

    counts_SV: int32 [S + 1, V] occurrences in the output; seen_SV: bool [S + 1, V] token occurs in
        the prompt or output;
    bias_ids_SN / bias_values_SN: [S + 1, N] logit bias, id -1 is empty; stop_ids_SM: int32 [S + 1,
        M], -1 is empty;
    grammar_SW: int32 [S + 1, ceil(V / 32)], bit i of word w set: id 32 w + i may come next.
    """

    counts_SV: Tensor
    seen_SV: Tensor
    bias_ids_SN: Tensor
    bias_values_SN: Tensor
    stop_ids_SM: Tensor
    grammar_SW: Tensor


class StepInputs(NamedTuple):
    """One step's inputs: int32 unless it says float32. The fields mirror
    engine.scheduler.batch.ScheduledBatch.

    token_ids_T: id, or -1: the slot's last drawn token. Padding: 0.
    positions_T: padding: 0.
    token_slots_T: padding: S (the dummy slot).
    kv_slots_T: page * page_size + offset; padding: -1, not written.
    row_slots_R: padding: S. row_starts_R: padding: 0. row_lens_R: padding: 0 (no token of T belongs
        to the row).
    row_offsets_R: index into T of the row's first token; padding: 0.
    logit_tokens_L: index into T; padding: 0. logit_slots_L: padding: S. logit_targets_L: padding:
        -2.
    logit_positions_L: padding: 0.
    sampling_floats_LF: float32, columns temperature, top_p, min_p, repetition, frequency, presence;
        padding: 0, 1, 0, 1, 0, 0 (greedy).
    sampling_ints_LI: columns top_k, seed_lo, seed_hi, flags; padding: 0.
    update_slots_U / update_columns_U / update_pages_U: padding: slot S, column 0, page 0.
    """

    token_ids_T: Tensor
    positions_T: Tensor
    token_slots_T: Tensor
    kv_slots_T: Tensor
    row_slots_R: Tensor
    row_starts_R: Tensor
    row_lens_R: Tensor
    row_offsets_R: Tensor
    logit_tokens_L: Tensor
    logit_slots_L: Tensor
    logit_targets_L: Tensor
    logit_positions_L: Tensor
    sampling_floats_LF: Tensor
    sampling_ints_LI: Tensor
    update_slots_U: Tensor
    update_columns_U: Tensor
    update_pages_U: Tensor


class StepOutputs(NamedTuple):
    """packed_LC: int32 [L, C], one device-to-host copy. Column 0 is the id drawn (-1: logits not
    finite).

    In the `full` variant also: column 1 the logprob of the drawn or target id (float32 bits),
    columns 2 .. 2+K the top ids, 2+K .. 2+2K their logprobs (float32 bits), descending, K =
    max_logprobs. In the plain variant C = 1.
    """

    packed_LC: Tensor


class TensorParallel(NamedTuple):
    """This rank's place on the tp axis; a compile-time constant.

    group: name of the process group. Empty: no collective is traced, and size is 1.
    symmetric: its ranks write into each other's buffers (models.ops.symmetric).
    """

    rank: int = 0
    size: int = 1
    group: str = ""
    symmetric: bool = False
