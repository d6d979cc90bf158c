"""Steps and their results to protobuf and back.

Decoding raises ValueError where bytes cannot be the field's type; the worker checks what they mean.
"""

from common.arrays import pack_float32, pack_int32, unpack_float32, unpack_int32
from common.sampling_codec import sampling_from_pb, sampling_to_pb
from common.step import (
    Candidates,
    Ints,
    LogprobRows,
    PromptLogprobs,
    SequenceState,
    Step,
    StepResult,
    StepStatus,
)
from quire.v1 import worker_pb2 as pb


def step_to_pb(step: Step) -> pb.StepRequest:
    """Encodes a step."""
    message = pb.StepRequest(
        epoch=step.epoch,
        step_id=step.step_id,
        snapshot=step.snapshot,
        freed_seats=pack_int32(step.freed_seats),
        whole=[_state_to_pb(state) for state in step.whole],
        append_pairs=pack_int32(step.append_pairs),
        swap_out=pack_int32(step.swap_out),
        placed=pack_int32(step.placed),
        swap_in=pack_int32(step.swap_in),
        copies=pack_int32(step.copies),
        rows=pack_int32(step.rows),
        num_tokens=pack_int32(step.num_tokens),
        num_spare_positions=step.num_spare_positions,
    )
    if step.samples is not None:
        message.samples = pack_int32(step.samples)
    if step.candidates:
        message.candidates = pack_int32(step.candidates)
    return message


def step_from_pb(message: pb.StepRequest) -> Step:
    """Decodes a step. Raises ValueError if an array's length is impossible."""
    return Step(
        epoch=message.epoch,
        step_id=message.step_id,
        snapshot=message.snapshot,
        freed_seats=unpack_int32(message.freed_seats),
        whole=[_state_from_pb(state) for state in message.whole],
        append_pairs=_unpack_pairs("append_pairs", message.append_pairs),
        swap_out=_unpack_pairs("swap_out", message.swap_out),
        placed=_unpack_tuples("placed", message.placed, 3, "triples"),
        swap_in=_unpack_pairs("swap_in", message.swap_in),
        copies=_unpack_pairs("copies", message.copies),
        rows=unpack_int32(message.rows),
        num_tokens=unpack_int32(message.num_tokens),
        samples=_unpack_pairs("samples", message.samples) if message.HasField("samples") else None,
        candidates=_unpack_pairs("candidates", message.candidates),
        num_spare_positions=message.num_spare_positions,
    )


def result_to_pb(result: StepResult) -> pb.StepResponse:
    """Encodes a step's result."""
    return pb.StepResponse(
        epoch=result.epoch,
        step_id=result.step_id,
        status=pb.StepStatus.ValueType(result.status),
        error=result.error,
        token_ids=pack_int32(result.token_ids),
        invalid_samples=pack_int32(result.invalid_samples),
        logprobs=[pb.SampleLogprobs(sample=sample, rows=_rows_to_pb(rows)) for sample, rows in result.logprobs.items()],
        prompt_logprobs=[
            pb.PromptLogprobs(seat=item.seat, position=item.position, rows=_rows_to_pb(item.rows))
            for item in result.prompt_logprobs
        ],
        queue_ns=result.queue_ns,
        exec_ns=result.exec_ns,
        total_ns=result.total_ns,
        swap_ns=result.swap_ns,
        candidates=[_candidates_to_pb(each) for each in result.candidates],
        forced=pack_int32([n for sample, forced in result.forced.items() for token in forced for n in (sample, token)]),
    )


def result_from_pb(message: pb.StepResponse) -> StepResult:
    """Decodes a step's result. Raises ValueError on an unknown status or an impossible array."""
    return StepResult(
        epoch=message.epoch,
        step_id=message.step_id,
        status=StepStatus(message.status),
        error=message.error,
        token_ids=unpack_int32(message.token_ids),
        invalid_samples=unpack_int32(message.invalid_samples),
        logprobs={item.sample: _rows_from_pb(item.rows) for item in message.logprobs},
        prompt_logprobs=[
            PromptLogprobs(seat=item.seat, position=item.position, rows=_rows_from_pb(item.rows))
            for item in message.prompt_logprobs
        ],
        queue_ns=message.queue_ns,
        exec_ns=message.exec_ns,
        total_ns=message.total_ns,
        swap_ns=message.swap_ns,
        candidates=[_candidates_from_pb(each) for each in message.candidates],
        forced=_forced_from_pb(message.forced),
    )


def _forced_from_pb(data: bytes) -> dict[int, Ints]:
    forced: dict[int, list[int]] = {}
    pairs = _unpack_pairs("forced", data)
    for sample, token_id in zip(pairs[::2], pairs[1::2], strict=True):
        forced.setdefault(sample, []).append(token_id)
    return dict(forced)


def _unpack_pairs(name: str, data: bytes) -> "list[int]":
    return _unpack_tuples(name, data, 2, "pairs")


def _unpack_tuples(name: str, data: bytes, size: int, kind: str) -> "list[int]":
    values = unpack_int32(data)
    if len(values) % size:
        raise ValueError(f"{name} holds {kind}, but has {len(values)} numbers")
    return values.tolist()


def _state_to_pb(state: SequenceState) -> pb.SequenceState:
    return pb.SequenceState(
        seat=state.seat,
        position=state.position,
        block_table=pack_int32(state.block_table),
        token_ids=pack_int32(state.token_ids),
        history=pack_int32(state.history),
        num_prompt_tokens=state.num_prompt_tokens,
        sampling=sampling_to_pb(state.sampling),
    )


def _state_from_pb(message: pb.SequenceState) -> SequenceState:
    return SequenceState(
        seat=message.seat,
        position=message.position,
        block_table=unpack_int32(message.block_table),
        token_ids=unpack_int32(message.token_ids),
        history=unpack_int32(message.history),
        num_prompt_tokens=message.num_prompt_tokens,
        sampling=sampling_from_pb(message.sampling),
    )


def _candidates_to_pb(candidates: Candidates) -> pb.Candidates:
    return pb.Candidates(
        token_ids=pack_int32(candidates.token_ids),
        logprobs=pack_float32(candidates.logprobs),
        rows=_rows_to_pb(candidates.rows) if candidates.rows is not None else None,
    )


def _candidates_from_pb(message: pb.Candidates) -> Candidates:
    return Candidates(
        token_ids=unpack_int32(message.token_ids),
        logprobs=unpack_float32(message.logprobs),
        rows=_rows_from_pb(message.rows) if message.HasField("rows") else None,
    )


def _rows_to_pb(rows: LogprobRows) -> pb.LogprobRows:
    return pb.LogprobRows(
        logprobs=pack_float32(rows.logprobs),
        ranks=pack_int32(rows.ranks),
        num_top=rows.num_top,
        top_token_ids=pack_int32(rows.top_token_ids),
        top_logprobs=pack_float32(rows.top_logprobs),
    )


def _rows_from_pb(message: pb.LogprobRows) -> LogprobRows:
    return LogprobRows(
        logprobs=unpack_float32(message.logprobs),
        ranks=unpack_int32(message.ranks),
        num_top=message.num_top,
        top_token_ids=unpack_int32(message.top_token_ids),
        top_logprobs=unpack_float32(message.top_logprobs),
    )
