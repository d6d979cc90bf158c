"""Clients of a run, their requests, times and behaviour: drawn from the seed, before the run.

A mixed population: greedy, drawn with a seed, several samples, ranked ones, beam searches, stop ids, log-probabilities,
priorities, deadlines; clients that hang up, read slowly, cancel, ask twice, or with another body, or never come back.
"""

from dataclasses import dataclass, field
from random import Random

from quire.v1 import inference_pb2 as pb
from tests.simulation import toy_model as model
from tests.simulation.closed_form import ClosedForm, SeenSample
from tests.simulation.toy_device import NAN_SEED, STEP_KILLER_SEED, WORKER_KILLER_SEED

LOAD_S = 4.0  # in which all requests arrive
BLOCK_SIZE = 4


@dataclass(slots=True, eq=False)
class Order:
    """One request of one client, and what that has seen of it."""

    request: pb.GenerateRequest
    arrives_s: float
    cancels_after_s: float | None = None
    paused: tuple[float, float] | None = None  # from when on, and for how long; then it is resumed again and again
    rival_of: "Order | None" = None  # which has the same id and another body
    closed_form: ClosedForm = field(init=False)
    samples: list[SeenSample] = field(default_factory=list)
    prompt_logprobs: list[tuple[int, float]] = field(default_factory=list)
    finished: pb.Finished | None = None
    is_refused: bool = False  # for good
    is_accepted: bool = False
    was_cancelled: bool = False  # its client said so
    is_present: bool = False  # a reader of it is there
    absent_since_s: float | None = None  # else: from its first submission on
    away_s: float = 0.0  # the longest time without a reader

    def __post_init__(self) -> None:
        self.closed_form = ClosedForm(self.request)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_done(self) -> bool:
        return self.finished is not None or self.is_refused

    @property
    def is_poisonous(self) -> bool:
        return self.request.sampling.seed in (NAN_SEED, STEP_KILLER_SEED, WORKER_KILLER_SEED)

    def sample(self, index: int) -> SeenSample:
        self.samples += [SeenSample() for _ in range(index + 1 - len(self.samples))]
        return self.samples[index]


@dataclass(slots=True, kw_only=True)
class ClientPlan:
    """One client process."""

    name: str
    orders: list[Order]
    absences: list[tuple[float, float]]  # when it hangs up, and for how long
    leaves_s: float | None  # when it goes for good
    reading_pause_s: float  # between two messages


@dataclass(frozen=True, slots=True, kw_only=True)
class PinPlan:
    """Prefix that a client pins and may unpin later."""

    name: str
    token_ids: list[int]
    at_s: float
    unpinned_s: float | None


@dataclass(frozen=True, slots=True)
class Load:
    """Load of a run."""

    clients: list[ClientPlan]
    pins: list[PinPlan]


def draw_load(random_: Random) -> Load:
    prefixes = [_tokens(random_, random_.randrange(BLOCK_SIZE, 4 * BLOCK_SIZE)) for _ in range(2)]
    plans: list[ClientPlan] = []
    orders: list[Order] = []
    num_requests = random_.randrange(4, 13)
    number = 0
    while number < num_requests:
        mine = []
        for _ in range(random_.choice([1, 1, 2, 3, 4])):
            number += 1
            order = Order(_request(random_, f"r{number}", prefixes), random_.uniform(0.0, LOAD_S))
            if random_.random() < 0.12:
                order.cancels_after_s = random_.uniform(0.0, 1.5)
            if random_.random() < 0.15:
                order.paused = (random_.uniform(0.0, 0.5), random_.choice([0.02, 0.5, 3.0]))
            mine.append(order)
        orders += mine
        plans.append(_client(random_, f"c{len(plans) + 1}", mine))
    for order in random_.sample(orders, k=min(len(orders), random_.choice([0, 0, 1, 2]))):
        plans.append(_follower(random_, f"c{len(plans) + 1}", order))
    pinned = random_.sample(prefixes, k=random_.choice([0, 0, 1, 2]))
    return Load(plans, [_pin(random_, f"p{number}", prefix) for number, prefix in enumerate(pinned)])


def _pin(random_: Random, name: str, prefix: list[int]) -> PinPlan:
    at_s = random_.uniform(0.0, LOAD_S)
    return PinPlan(
        name=name,
        token_ids=prefix,
        at_s=at_s,
        unpinned_s=at_s + random_.uniform(0.001, 2.0) if random_.random() < 0.4 else None,
    )


def _client(random_: Random, name: str, orders: list[Order]) -> ClientPlan:
    absences = []
    if random_.random() < 0.35:
        absences = [
            (random_.uniform(0.1, LOAD_S + 2), random_.choice([0.01, 0.3, 1.5, 7.0]))
            for _ in range(random_.randrange(1, 4))
        ]
    return ClientPlan(
        name=name,
        orders=orders,
        absences=sorted(absences),
        leaves_s=random_.uniform(0.2, LOAD_S) if random_.random() < 0.05 else None,
        reading_pause_s=random_.choice([0.0, 0.0, 0.0, 0.05, 0.5]),
    )


def _follower(random_: Random, name: str, order: Order) -> ClientPlan:
    """Asks for the same again, or for something else under the same id."""
    request = pb.GenerateRequest()
    request.CopyFrom(order.request)
    rival_of = None
    if random_.random() < 0.5:
        request.token_ids.ids.append(1)
        rival_of = order
    else:
        order.cancels_after_s = None  # whose wish would count is left open
        order.request.on_disconnect = request.on_disconnect = pb.ON_DISCONNECT_CONTINUE
        order.request.ClearField("timeout_ms")
        request.ClearField("timeout_ms")
    again = Order(request, order.arrives_s + random_.choice([0.0, 0.001, 0.3, 2.0]), rival_of=rival_of)
    return ClientPlan(name=name, orders=[again], absences=[], leaves_s=None, reading_pause_s=0.0)


def _request(random_: Random, request_id: str, prefixes: list[list[int]]) -> pb.GenerateRequest:
    head = random_.choice(prefixes) if random_.random() < 0.5 else []
    prompt = head + _tokens(random_, random_.randrange(1, 12))
    request = pb.GenerateRequest(request_id=request_id, token_ids=pb.TokenIds(ids=prompt))
    request.output.token_ids = True
    request.stopping.max_tokens = random_.randrange(1, random_.choice([6, 16, 26]))
    request.sampling.seed = random_.getrandbits(64)
    _choose_kind(random_, request)
    if random_.random() < 0.3:
        request.output.logprobs = random_.randrange(3)
    if random_.random() < 0.1:
        request.output.prompt_logprobs = random_.randrange(2)
    if random_.random() < 0.2:
        request.stopping.stop_token_ids.extend(random_.sample(range(model.VOCAB_SIZE - 1), 2))
    if random_.random() < 0.15:
        request.stopping.min_tokens = random_.randrange(request.stopping.max_tokens + 1)
    if random_.random() < 0.1:
        request.stopping.ignore_eos = True
    if random_.random() < 0.2:
        request.priority = random_.choice([-1, 1])
    if random_.random() < 0.12:
        request.timeout_ms = random_.choice([1, 150, 600, 2500])
    if random_.random() < 0.1:
        request.tenant = "other"
    if random_.random() < 0.4:
        request.on_disconnect = pb.ON_DISCONNECT_CONTINUE
    if random_.random() < 0.04:
        request.sampling.seed = random_.choice([NAN_SEED, STEP_KILLER_SEED, WORKER_KILLER_SEED])
    return request


def _choose_kind(random_: Random, request: pb.GenerateRequest) -> None:
    kind, sampling = random_.random(), request.sampling
    if kind < 0.25:
        sampling.temperature = 0.0
    elif kind < 0.45:
        sampling.first_sample_index = random_.choice([0, 3])
    elif kind < 0.6:
        sampling.n = random_.randrange(2, 5)
    elif kind < 0.75:
        sampling.n = random_.randrange(1, 3)
        sampling.best_of = sampling.n + random_.randrange(1, 3)
    else:
        request.beam.beam_width = random_.randrange(2, 5)
        request.beam.early_stopping = random_.choice(
            [pb.EARLY_STOPPING_FALSE, pb.EARLY_STOPPING_TRUE, pb.EARLY_STOPPING_NEVER]
        )
        sampling.n = random_.randrange(1, request.beam.beam_width + 1)


def _tokens(random_: Random, count: int) -> list[int]:
    return [random_.randrange(model.VOCAB_SIZE - 1) for _ in range(count)]
