"""Other schedulers that this process has seen lead, by their leases. Knows no store."""

from scheduler_svc.journal.leases import Lease


class SeenLeaders:
    """One per process. `has_any`: one had the lease at some time. `latest_epoch`: of all; 0: none had one yet."""

    def __init__(self) -> None:
        self.has_any = False
        self.latest_epoch = 0

    def record(self, lease: Lease) -> None:
        """Record another scheduler's lease."""
        self.has_any = True
        self.latest_epoch = max(self.latest_epoch, lease.epoch)
