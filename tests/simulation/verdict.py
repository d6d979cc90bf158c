"""Verdict on a request as its client sees its end, and on everything when all is quiet."""

from quire.v1 import inference_pb2 as pb
from scheduler_svc.core.scheduler import Scheduler
from tests.simulation.closed_form import SeenSample
from tests.simulation.load import Order

SLACK_S = 0.5


def fault_of_end(
    order: Order, now_s: float, grace_s: float, wall_span_s: float = 0.0, *, may_be_convicted: bool = False
) -> str | None:
    """Describe what is wrong with a request's end as its client saw it; None if nothing is.

    Over a change of leaders a deadline may pass early by as much as the time of day was set: `wall_span_s` at most.
    `may_be_convicted`: its losses of workers look as if it had caused them.
    """
    finished, request = order.finished, order.request
    assert finished is not None
    name, state = order.request_id, finished.state
    is_whole = state == pb.REQUEST_STATE_FINISHED
    faults = order.closed_form.faults_of(order.samples, is_whole=is_whole)
    if state == pb.REQUEST_STATE_CANCELLED:
        is_abandoned = request.on_disconnect != pb.ON_DISCONNECT_CONTINUE and order.away_s > grace_s - SLACK_S
        if not order.was_cancelled and not is_abandoned:
            faults.append(f"P1: it was cancelled, which nobody asked for; nobody read it for {order.away_s:.1f} s")
    elif state == pb.REQUEST_STATE_EXPIRED:
        due_s = order.arrives_s + request.timeout_ms / 1000 - wall_span_s
        if not request.HasField("timeout_ms") or (order.samples and order.samples[0].token_ids and now_s < due_s):
            faults.append(f"P1: it expired at {now_s:.3f} s, with {request.timeout_ms} ms from {order.arrives_s:.3f} s")
    elif state == pb.REQUEST_STATE_FAILED:
        if not order.is_poisonous and not may_be_convicted:
            faults.append(f"P6: it failed: {finished.error}")
    elif not is_whole:
        faults.append(f"P1: it ended as {state}")
    if is_whole and request.output.HasField("prompt_logprobs"):
        due = order.closed_form.prompt_logprobs()
        if order.prompt_logprobs != due:
            faults.append(f"log-probabilities of its prompt are {order.prompt_logprobs}, and should be {due}")
    return f"P2: {name}: {'; '.join(faults)}" if faults else None


def faults_of_rest(scheduler: Scheduler, num_samplings: int) -> list[str]:
    """P7: what a scheduler without requests still holds."""
    faults = []
    try:
        scheduler.check()
    except AssertionError as error:
        faults.append(f"P7: the scheduler's memory does not add up: {error}")
    if num_samplings:
        faults.append(f"P7: {num_samplings} sampling parameters are left behind")
    return faults + [
        f"P7: {worker} holds blocks, and nothing runs"
        for worker in scheduler.stats().workers
        if worker.num_used_blocks != worker.num_pinned_blocks or worker.num_used_host_blocks
    ]


def is_beginning(outputs: list[list[int]], of: list[list[int]]) -> bool:
    """True if each output is the beginning of the one that is to be compared with it."""
    return len(outputs) == len(of) and all(whole[: len(some)] == some for some, whole in zip(outputs, of, strict=True))


def faults_of_record(order: Order, response: pb.GetRequestResponse, *, has_lost_data: bool) -> list[str]:
    """Faults of a record that differs from what was seen, or from the expected output.

    If the store has lost data when the leader died, a request without the time to be computed again lacks tokens.
    """
    name, faults = order.request_id, []
    came = [list(sample.token_ids) for sample in response.samples]
    if order.finished is not None:
        seen = [sample.token_ids for sample in order.samples]
        is_cut_short = has_lost_data and response.state in (pb.REQUEST_STATE_EXPIRED, pb.REQUEST_STATE_CANCELLED)
        is_equal = is_beginning(came, seen) if is_cut_short else came == seen
        if response.state != order.finished.state or not is_equal:
            faults.append(f"{name}: its record has {response.state} {came}, seen was {order.finished.state} {seen}")
        ends = [sample.finish for sample in order.samples]
        if [sample.finish for sample in response.samples] != ends:
            faults.append(f"{name}: the ends in its record are not those that were seen")
    else:
        samples = [SeenSample(list(each.token_ids), [], each.finish) for each in response.samples]
        if not order.request.output.HasField("logprobs"):
            is_whole = response.state == pb.REQUEST_STATE_FINISHED
            faults += order.closed_form.faults_of(samples, is_whole=is_whole)
    if response.usage.completion_tokens != sum(len(each) for each in came):
        faults.append(f"{name}: {response.usage.completion_tokens} tokens are said to have come: {came}")
    return [f"P2: {fault}" for fault in faults]
