"""Sampling inside the graph: logits and settings per row in; token ids, logprobs and updated
per-slot state out.

`sample` is traced as the tail of a step and runs eagerly too. The two halves of it:
    full only: penalties, logit bias, stop-id mask and grammar mask give the logits that logprobs
        are taken of;
    always: temperature, top-k, top-p, min-p, and a draw by Gumbel-max, argmax(logit / T + g(u)).
u is a hash of (seed, position, token id) and of nothing else, so that a draw never depends on batch
mates, padding, bucket or device (up to float rounding). Rows at temperature 0 take the argmax,
lowest id on ties.

Knows nothing of models, requests or how a batch is scheduled.

Legend: L logit rows, V vocab, C chunks of W ids (C * W >= V), S slots, N bias entries, M stop ids,
K top logprobs.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from models.draw import draw
from models.head_draw import head_draw
from models.inputs import SamplingState, StepInputs, StepOutputs, StepState
from models.ops.sampling import filter_threshold

# Columns of StepInputs.sampling_floats_LF and sampling_ints_LI, and the flags, as in
# engine.scheduler.batch.
TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(6)
TOP_K, SEED_LO, SEED_HI, FLAGS = range(4)
FLAG_MASK_STOP = 1
FLAG_COUNT = 2
FLAG_GUIDED = 4

DRAW = -1  # logit_targets_L: draw the slot's next token; other negative targets draw and discard
LOGPROB_FLOOR = -9999.0
# Ids per first-stage reduction: what Inductor keeps in registers, so that a chunk is read once.
_MAX_CHUNK = 1024
_MIN_CHUNK = 128


def sample(
    variant: Literal["plain", "full"],
    logits_LV: Tensor,
    inputs: StepInputs,
    state: StepState,
    sampling_state: SamplingState | None,
    max_logprobs: int,
) -> StepOutputs:
    """Draw (or score) one token per logit row.

    Args:
        variant: "plain" reads temperature, top-k, top-p, min-p and seed only; "full" everything.
        logits_LV: float32 [L, V]; "plain" also takes bfloat16 or float16 and casts as it reads.
        inputs: the step's inputs; rows with logit_targets >= 0 are scored on the logits as they
            are.
        state: last_token_S is mutated at the slots of rows whose target is -1 (0 where the row is
            not finite).
        sampling_state: "full" only; counts_SV and seen_SV are mutated for drawn rows with
            FLAG_COUNT.
        max_logprobs: K, alternatives reported per row in "full".

    Returns:
        StepOutputs; an id of -1 marks a row with a NaN, a +inf, or nothing but -inf.
    """
    floats_LF, ints_LI = inputs.sampling_floats_LF, inputs.sampling_ints_LI
    temperature_L = floats_LF[:, TEMPERATURE]
    if variant == "full":
        assert sampling_state is not None
        logits_LV = _adjust(logits_LV.float(), inputs, sampling_state)
        # A scored row needs no filters, which cost time.
        temperature_L = torch.where(inputs.logit_targets_L >= 0, 0.0, temperature_L)
    threshold_L = filter_threshold(
        logits_LV, temperature_L, ints_LI[:, TOP_K], floats_LF[:, TOP_P], floats_LF[:, MIN_P]
    )
    noise_of_L = (ints_LI[:, SEED_LO], ints_LI[:, SEED_HI], inputs.logit_positions_L)
    drawn_L, finite_L = draw(logits_LV, threshold_L, temperature_L, *noise_of_L)
    ids_L, slots_L = _keep(drawn_L, finite_L, inputs, state)
    if variant == "plain":
        return StepOutputs(ids_L.unsqueeze(1))

    assert sampling_state is not None
    counted_L = (inputs.logit_targets_L == DRAW) & finite_L & _flag(inputs, FLAG_COUNT)
    _count(sampling_state, slots_L, ids_L.clamp(min=0), counted_L)
    return StepOutputs(torch.cat(_report(logits_LV, ids_L, max_logprobs), dim=1))


def sample_hidden(
    x_LE: Tensor, head_VE: Tensor, inputs: StepInputs, state: StepState
) -> StepOutputs:
    """`sample` of the plain variant, from the LM head's input and weight.

    The same ids but for logits that are equal up to rounding; `models.head_draw` says what it
    spares.
    """
    settings = (inputs.sampling_floats_LF, inputs.sampling_ints_LI, inputs.logit_positions_L)
    drawn_L, finite_L = head_draw(x_LE, head_VE, *settings)
    return StepOutputs(_keep(drawn_L, finite_L, inputs, state)[0].unsqueeze(1))


def _keep(
    drawn_L: Tensor, finite_L: Tensor, inputs: StepInputs, state: StepState
) -> tuple[Tensor, Tensor]:
    """The ids to report, and the slots that now hold them: the dummy where a row draws for none."""
    targets_L = inputs.logit_targets_L
    ids_L = torch.where(targets_L >= 0, targets_L, drawn_L.int())
    ids_L = torch.where(finite_L, ids_L, -1)
    dummy = state.last_token_S.shape[0] - 1
    slots_L = torch.where(targets_L == DRAW, inputs.logit_slots_L, dummy).long()
    state.last_token_S.index_put_((slots_L,), ids_L.clamp(min=0))
    return ids_L, slots_L


def _flag(inputs: StepInputs, flag: int) -> Tensor:
    return (inputs.sampling_ints_LI[:, FLAGS] & flag) != 0


# --- full: the logits that are reported -----------------------------------------------------------


def _adjust(logits_LV: Tensor, inputs: StepInputs, sampling_state: SamplingState) -> Tensor:
    """Penalties, masks and bias. Rows that only score a target are left as they are."""
    drawn_L1 = (inputs.logit_targets_L < 0).unsqueeze(1)
    slots_L = inputs.logit_slots_L.long()
    floats_LF = inputs.sampling_floats_LF

    seen_LV = sampling_state.seen_SV[slots_L] & drawn_L1
    repetition_L1 = floats_LF[:, REPETITION, None]
    repeated_LV = torch.where(logits_LV > 0, logits_LV / repetition_L1, logits_LV * repetition_L1)
    logits_LV = torch.where(seen_LV, repeated_LV, logits_LV)

    counts_LV = torch.where(drawn_L1, sampling_state.counts_SV[slots_L], 0)
    logits_LV = logits_LV - floats_LF[:, FREQUENCY, None] * counts_LV
    logits_LV = logits_LV - torch.where(counts_LV > 0, floats_LF[:, PRESENCE, None], 0.0)

    guided_L1 = drawn_L1 & _flag(inputs, FLAG_GUIDED).unsqueeze(1)
    allowed_LV = _unpack_bits(sampling_state.grammar_SW[slots_L], logits_LV.shape[1])
    logits_LV = torch.where(guided_L1 & ~allowed_LV, -math.inf, logits_LV)

    # Bias and stop mask in one scatter: ids may repeat between the two and empty entries add 0 to
    # id 0.
    masked_L1 = drawn_L1 & _flag(inputs, FLAG_MASK_STOP).unsqueeze(1)
    bias_ids_LN = sampling_state.bias_ids_SN[slots_L]
    stop_ids_LM = sampling_state.stop_ids_SM[slots_L]
    use_bias_LN = drawn_L1 & (bias_ids_LN >= 0)
    bias_LN = torch.where(use_bias_LN, sampling_state.bias_values_SN[slots_L], 0.0)
    stop_LM = torch.where(masked_L1 & (stop_ids_LM >= 0), -math.inf, 0.0)
    ids = torch.cat([bias_ids_LN, stop_ids_LM], dim=1).clamp(min=0).long()
    return logits_LV.scatter_add(1, ids, torch.cat([bias_LN, stop_LM], dim=1))


def _unpack_bits(words_LW: Tensor, vocab: int) -> Tensor:
    """bool [L, V] from int32 words; bit i of word w is id 32 w + i."""
    bits_32 = torch.arange(32, device=words_LW.device, dtype=torch.int32)
    bits_LW32 = (words_LW.unsqueeze(-1) >> bits_32) & 1
    return bits_LW32.flatten(1)[:, :vocab] != 0


def _count(
    sampling_state: SamplingState, slots_L: Tensor, tokens_L: Tensor, counted_L: Tensor
) -> None:
    """Count the tokens drawn. Rows that do not count add 0 to the dummy slot, which stays clean."""
    dummy = sampling_state.counts_SV.shape[0] - 1
    where = (torch.where(counted_L, slots_L, dummy), torch.where(counted_L, tokens_L, 0).long())
    sampling_state.counts_SV.index_put_(where, counted_L.int(), accumulate=True)
    sampling_state.seen_SV.index_put_(where, counted_L)


def _report(logits_LV: Tensor, ids_L: Tensor, max_logprobs: int) -> list[Tensor]:
    """The columns of StepOutputs.packed_LC in the full variant."""
    top_L1, log_mass_L1 = _log_norm(logits_LV)
    own_L1 = logits_LV.gather(1, ids_L.clamp(min=0).long().unsqueeze(1))
    own_L1 = own_L1 - top_L1 - log_mass_L1
    columns = [ids_L.unsqueeze(1), _logprob_bits(own_L1)]
    if max_logprobs > 0:
        num = min(max_logprobs, logits_LV.shape[1])
        best_LK, best_ids_LK = logits_LV.topk(num, dim=1)
        best_LK = best_LK - top_L1 - log_mass_L1
        padding = (0, max_logprobs - num)  # of a vocabulary smaller than K
        columns.append(F.pad(best_ids_LK.int(), padding))
        columns.append(_logprob_bits(F.pad(best_LK, padding, value=LOGPROB_FLOOR)))
    return columns


def _log_norm(logits_LV: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum and log(sum(exp(logits - maximum))), each [L, 1].

    Over chunks, so that a row keeps a whole GPU busy.
    """
    logits_LCW, tops_LC, bases_LC = _chunked(logits_LV)
    mass_LC = (logits_LCW - bases_LC.unsqueeze(2)).exp().sum(dim=2)
    top_L1 = tops_LC.amax(dim=1, keepdim=True)
    return top_L1, ((tops_LC - top_L1).exp() * mass_LC).sum(dim=1, keepdim=True).log()


def _chunks(vocab: int) -> tuple[int, int]:
    """(C, W): W divides the vocabulary if a fair divisor exists, else the last chunk is padded."""
    for width in range(min(_MAX_CHUNK, vocab), _MIN_CHUNK - 1, -1):
        if vocab % width == 0:
            return vocab // width, width
    width = min(_MAX_CHUNK, vocab)
    return -(-vocab // width), width


def _chunked(logits_LV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 logits [L, C, W], each chunk's maximum [L, C], and that with 0 for -inf."""
    num_chunks, width = _chunks(logits_LV.shape[1])
    padded = F.pad(logits_LV, (0, num_chunks * width - logits_LV.shape[1]), value=-math.inf)
    logits_LCW = padded.float().view(-1, num_chunks, width)
    tops_LC = logits_LCW.amax(dim=2)
    # A chunk of nothing but -inf would give NaN differences.
    return logits_LCW, tops_LC, torch.where(tops_LC == -math.inf, 0.0, tops_LC)


def _logprob_bits(logprobs: Tensor) -> Tensor:
    """Float32 bits as int32; NaN becomes the floor, and what rounding left above 0 becomes 0."""
    finite = torch.where(logprobs > LOGPROB_FLOOR, logprobs.clamp(max=0.0), LOGPROB_FLOOR)
    return finite.view(torch.int32)


# --- per-slot state, outside the graph ------------------------------------------------------------


def init_sampling_state(
    num_slots: int, vocab: int, max_bias: int, max_stop: int, device: torch.device | str
) -> SamplingState:
    """The state of `num_slots` slots and the dummy, with nothing counted, biased or masked.

    Takes 5.125 * (num_slots + 1) * vocab bytes and little more.
    """
    rows = num_slots + 1
    return SamplingState(
        counts_SV=torch.zeros(rows, vocab, dtype=torch.int32, device=device),
        seen_SV=torch.zeros(rows, vocab, dtype=torch.bool, device=device),
        bias_ids_SN=torch.full((rows, max_bias), -1, dtype=torch.int32, device=device),
        bias_values_SN=torch.zeros(rows, max_bias, device=device),
        stop_ids_SM=torch.full((rows, max_stop), -1, dtype=torch.int32, device=device),
        grammar_SW=torch.zeros(rows, -(-vocab // 32), dtype=torch.int32, device=device),
    )


def admit(
    sampling_state: SamplingState,
    slot: int,
    prompt_ids: NDArray[np.int32],
    output_ids: NDArray[np.int32],
    bias_ids: NDArray[np.int32],
    bias_values: NDArray[np.float32],
    stop_ids: NDArray[np.int32],
) -> None:
    """Set a slot's rows for the request that it now holds; eager, ordered with the steps by the
    current stream.

    One copy to the device from pinned memory, which torch keeps until the copy is done; nothing
    waits.

    Args:
        sampling_state: mutated at row `slot`.
        slot: in [0, S).
        prompt_ids: [any], seen by the repetition penalty.
        output_ids: [any], generated so far: seen, and counted.
        bias_ids, bias_values: [<= N] the same number of distinct ids and their bias.
        stop_ids: [<= M].
    """
    counts_SV, seen_SV, bias_ids_SN, bias_values_SN, stop_ids_SM, _ = sampling_state
    num_bias, num_stop = bias_ids_SN.shape[1], stop_ids_SM.shape[1]
    assert 0 <= slot < counts_SV.shape[0] - 1, slot
    assert len(bias_ids) == len(bias_values) <= num_bias, (len(bias_ids), num_bias)
    assert len(stop_ids) <= num_stop, (len(stop_ids), num_stop)
    seen_ids = np.unique(np.concatenate([prompt_ids, output_ids]))
    counted_ids, counts = np.unique(output_ids, return_counts=True)
    parts = (
        _padded(bias_ids, num_bias, -1),
        _padded(bias_values, num_bias, 0.0).view(np.int32),
        _padded(stop_ids, num_stop, -1),
        seen_ids.astype(np.int32),
        counted_ids.astype(np.int32),
        counts.astype(np.int32),
    )
    on_cuda = counts_SV.is_cuda
    packed = torch.empty(sum(map(len, parts)), dtype=torch.int32, pin_memory=on_cuda)
    np.concatenate(parts, out=packed.numpy())
    on_device = packed.to(counts_SV.device, non_blocking=True)
    bias_ids_N, bias_bits_N, stop_ids_M, seen, counted, times = torch.split(
        on_device, [len(part) for part in parts]
    )
    bias_ids_SN[slot].copy_(bias_ids_N)
    bias_values_SN[slot].copy_(bias_bits_N.view(torch.float32))
    stop_ids_SM[slot].copy_(stop_ids_M)
    seen_SV[slot].zero_().index_fill_(0, seen.long(), True)
    counts_SV[slot].zero_().index_copy_(0, counted.long(), times)


def allow(
    sampling_state: SamplingState, slots: NDArray[np.int32], masks: NDArray[np.int32]
) -> None:
    """Set what may come next in some slots; ordered and copied as `admit` does.

    Args:
        sampling_state: grammar_SW is mutated at `slots`.
        slots: [G] distinct, each in [0, S).
        masks: [G, W], as grammar_SW has them.
    """
    grammar_SW = sampling_state.grammar_SW
    packed = torch.empty(slots.size + masks.size, dtype=torch.int32, pin_memory=grammar_SW.is_cuda)
    np.concatenate([slots, masks.reshape(-1)], out=packed.numpy())
    on_device = packed.to(grammar_SW.device, non_blocking=True)
    rows, words = torch.split(on_device, [slots.size, masks.size])
    grammar_SW.index_copy_(0, rows.long(), words.view(masks.shape))


def _padded(values: NDArray[Any], length: int, fill: float) -> NDArray[Any]:
    out = np.full(length, fill, values.dtype)
    out[: len(values)] = values
    return out
