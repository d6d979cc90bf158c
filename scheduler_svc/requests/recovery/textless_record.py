"""Record of an ended request whose text cannot be made any more, since its model was replaced."""

from common.arrays import pack_int32
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.requests.live.live_request import FINISH_REASON_OF_STATE
from scheduler_svc.requests.recovery.journal_replay import JournaledRequest


def record_without_text(journaled: JournaledRequest, finish: journal_pb2.Finish) -> journal_pb2.RequestRecord:
    """Record without text, with this end and the tokens of samples that are drawn."""
    admission, request = journaled.admission, journaled.admission.request
    num_samples = request.sampling.n or 1
    reason = FINISH_REASON_OF_STATE.get(finish.state, pb.FINISH_REASON_UNSPECIFIED)
    samples = journaled.samples if len(journaled.samples) == num_samples else []
    outcome = finish.outcome if finish.HasField("outcome") else None
    usage = pb.Usage(
        prompt_tokens=journaled.num_prompt_tokens,
        completion_tokens=sum(len(each.token_ids) for each in samples),
        num_preemptions=journaled.num_preemptions,
    )
    return journal_pb2.RequestRecord(
        response=pb.GetRequestResponse(
            request_id=journaled.request_id,
            state=finish.state,
            samples=[
                pb.SampleOutput(token_ids=each.token_ids, finish=each.finish or pb.SampleFinish(reason=reason))
                for each in samples
            ],
            usage=outcome.usage if outcome else usage,
            timings=outcome.timings if outcome else None,
            memory=outcome.memory if outcome else None,
            error=finish.error,
            created_unix_ns=admission.arrived_unix_ns,
            seed=request.sampling.seed,
            tenant=request.tenant,
            annotation=request.annotation,
        ),
        request_digest=admission.request_digest,
        output=request.output,
        max_tokens=request.stopping.max_tokens,
        samples=[
            journal_pb2.SampleRecord(released_ends=pack_int32([0] * len(each.token_ids)), logprobs=each.logprobs)
            for each in samples
        ],
        prompt_logprobs=journaled.prompt_logprobs,
        num_samples=num_samples,
    )
