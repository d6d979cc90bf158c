"""Sampling parameters to protobuf and back.

Decoding raises ValueError where bytes cannot be the field's type. Checks no ranges.
"""

from typing import Any

from common.arrays import pack_float32, pack_int32, unpack_float32, unpack_int32
from common.sampling_params import NUMERIC_PARAMS, SequenceSampling
from quire.v1 import inference_pb2, worker_pb2


def given_numbers(message: inference_pb2.SamplingParams) -> dict[str, Any]:
    """Numeric parameters that the message sets, by name."""
    return {each.name: getattr(message, each.name) for each in NUMERIC_PARAMS if message.HasField(each.name)}  # type: ignore[arg-type]


def sampling_to_pb(sampling: SequenceSampling) -> worker_pb2.SequenceSampling:
    """Encode the parameters of a sequence; numbers that are without effect are left out."""
    numbers = {each.name: value for each in NUMERIC_PARAMS if (value := getattr(sampling, each.name)) != each.default}
    return worker_pb2.SequenceSampling(
        seed=sampling.seed,
        sample_index=sampling.sample_index,
        numbers=inference_pb2.SamplingParams(**numbers),
        bias_ids=pack_int32(token for token, _ in sampling.logit_bias),
        bias_values=pack_float32(bias for _, bias in sampling.logit_bias),
        allowed_ids=pack_int32(sampling.allowed_token_ids or ()),
        suppressed_ids=pack_int32(sampling.suppressed_token_ids),
        suppressed_until=sampling.suppressed_until,
        num_logprobs=sampling.num_logprobs,
        num_prompt_logprobs=sampling.num_prompt_logprobs,
        grammar=sampling.grammar,
        forces_text=sampling.forces_text,
    )


def sampling_from_pb(message: worker_pb2.SequenceSampling) -> SequenceSampling:
    """Decode the parameters of a sequence.

    Raises ValueError if the numbers are missing, as in a step of an older scheduler, or if lists that belong together
    differ in length.
    """
    if not message.HasField("numbers"):
        raise ValueError("numbers is missing: the scheduler and this worker are of different versions")
    bias_ids, bias_values = unpack_int32(message.bias_ids), unpack_float32(message.bias_values)
    if len(bias_ids) != len(bias_values):
        raise ValueError(f"there are {len(bias_ids)} bias_ids and {len(bias_values)} bias_values: send one per id")
    return SequenceSampling(
        seed=message.seed,
        sample_index=message.sample_index,
        logit_bias=tuple(zip(bias_ids, bias_values, strict=True)),
        allowed_token_ids=unpack_int32(message.allowed_ids) or None,
        suppressed_token_ids=tuple(unpack_int32(message.suppressed_ids)),
        suppressed_until=message.suppressed_until,
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        grammar=message.grammar,
        forces_text=message.forces_text,
        **given_numbers(message.numbers),
    )
