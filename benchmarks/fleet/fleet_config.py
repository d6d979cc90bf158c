"""Configuration of a simulated fleet: how much of everything, what it costs, and the times that services are set to."""

from dataclasses import dataclass

from benchmarks.fleet.costs import SchedulerCosts, WorkerCosts
from common.rpc import QUICK_KEEPALIVE
from scheduler_svc.workers.workers import LEASE_MS

NETWORK_S = 1e-4  # one way between any two processes
JOURNAL_S = 1e-4  # until an entry is acknowledged
LEASE_S = 1.5  # of a leader: the default of `lease_ms`
PUBLISH_S = 0.5  # between two descriptions of a shard by its leader
TOPOLOGY_S = 0.25  # between two messages of a Topology stream
ROLES_S = 0.25  # between two decisions of a scheduler about what it leads
DETECT_S = QUICK_KEEPALIVE.time_s + QUICK_KEEPALIVE.timeout_s  # until a scheduler misses a worker whose host is gone
REGISTER_S = LEASE_MS / 3000  # between two registrations of a worker
LEADERLESS_S = 6.0  # after which a worker whose shard has no leader asks for another one
RETURN_S = 0.3  # of a worker: to register with another leader, and be described
DRAIN_POLL_S = 0.05
HAND_OVER_S = 0.01  # between two leaders, one of which was told to end
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetConfig:
    """Scenario of one simulation.

    Closed loop: each client sends its next request when it has the last token of the one before, so `num_clients`
    requests are live all the time.
    """

    num_workers: int
    num_shards: int
    num_clients: int
    worker: WorkerCosts
    scheduler: SchedulerCosts
    num_schedulers: int = 0  # 0: one a shard
    num_gateways: int = 16  # processes that choose shards, each for its part of the clients
    gateway_token_s: float = 0.0  # CPU time of a gateway for a token; 0: none is charged
    num_blocks: int = 4096  # of 16 tokens, each worker
    num_seats: int = 256
    max_batched_tokens: int = 2048
    fixed_lengths: tuple[int, int] | None = None  # prompt and output tokens of each request; None: as in ShareGPT
    seconds: float = 4.0
    ramp_s: float = 0.5  # over which the clients begin
    warm_s: float = 2.0  # from the start; figures are of what happens later
    is_cold: bool = False  # nobody leads or serves at the start; else all shards are led and have their workers
    rack_fails_s: float | None = None  # moment at which one rack is gone
    num_racks: int = 10  # that workers and schedulers are spread over, at random
    seed: int = 20
    is_timed: bool = False  # measure the CPU time that the real core takes here; virtual time is the same

    @property
    def num_processes(self) -> int:
        """Schedulers, leading or standing by."""
        return self.num_schedulers or self.num_shards
