"""Gateways and their clients in virtual time: each sends its requests by the real router, one after another.

A gateway may be charged for the tokens that pass it: its process has one core.
"""

from collections.abc import Callable, Sequence
from random import Random

from benchmarks.fleet.fleet_config import NETWORK_S, TOPOLOGY_S, FleetConfig
from benchmarks.fleet.fleet_outcome import FleetOutcome
from benchmarks.fleet.fleet_request import FleetRequest, RequestSource
from benchmarks.fleet.timeline import Timeline
from quire.shard_router import ShardRouter
from quire.shards import Shard

Submit = Callable[[FleetRequest], None]


class Gateways:
    """Gateways of a fleet. A client has one, and keeps it."""

    def __init__(self, config: FleetConfig, timeline: Timeline, outcome: FleetOutcome) -> None:
        self.are_charged = config.gateway_token_s > 0
        self._config = config
        self._timeline = timeline
        self._outcome = outcome
        self._source = RequestSource(config)
        self._routers = [ShardRouter() for _ in range(config.num_gateways)]
        self._free_s = [0.0] * config.num_gateways

    def start(self, views: Sequence[Callable[[], list[Shard]]], submit: Submit) -> None:
        """Let gateways follow the shards, each by one of the views and at moments of its own, and clients begin."""
        self._submit = submit
        for number, router in enumerate(self._routers):
            first_s = TOPOLOGY_S * (number + 1) / len(self._routers)
            self._follow(router, views[number % len(views)], first_s)
        random = Random(self._config.seed)
        for client in range(self._config.num_clients):
            begin_s = random.uniform(0.0, self._config.ramp_s)
            self._timeline.at(begin_s, lambda client=client: self._send(client, is_first=True))  # type: ignore[misc]

    def pass_tokens(self, requests: list[FleetRequest], moment_s: float) -> float:
        """Pass a token of each request on to its client. Returns when the last one has come."""
        last_s = moment_s
        for request in requests:
            gateway = request.client % len(self._free_s)
            come_s = self._free_s[gateway] = max(self._free_s[gateway], moment_s) + self._config.gateway_token_s
            self._outcome.count_tokens(come_s, 1)
            last_s = max(last_s, come_s)
        return last_s

    def note_first(self, request: FleetRequest, moment_s: float) -> None:
        """Note that the first token of a request comes at a moment."""
        request.first_s = moment_s
        self._outcome.first_token_s.append((moment_s, moment_s - request.submitted_s))

    def note_end(self, request: FleetRequest, moment_s: float) -> None:
        """Note that the last token of a request comes at a moment: then its client sends the next one."""
        self._outcome.num_ended += 1
        assert request.first_s is not None, "a last token without a first"
        if request.num_output > 1 and moment_s >= self._config.warm_s:
            self._outcome.token_s.append((moment_s - request.first_s) / (request.num_output - 1))
        self._timeline.at(moment_s, lambda: self._send(request.client, is_first=False))

    def _follow(self, router: ShardRouter, view: Callable[[], list[Shard]], first_s: float) -> None:
        router.record_shards(view())
        self._timeline.every(TOPOLOGY_S, first_s, lambda: router.record_shards(view()))

    def _send(self, client: int, *, is_first: bool) -> None:
        now_s = self._timeline.now_s
        request = self._source.make(client, now_s, is_first=is_first)
        request.shard = self._routers[client % len(self._routers)].choose_shard(request.prompt, salt=None, tenant=None)
        self._outcome.num_submitted += 1
        self._timeline.at(now_s + NETWORK_S, lambda: self._submit(request))
