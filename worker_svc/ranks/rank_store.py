"""The store by which the ranks of a group find each other for their collectives."""

import datetime

from torch._C._distributed_c10d import TCPStore

_START_S = 300.0  # for all ranks to find each other


class RankStore:
    """A rank's connection to the store, which is on rank 0's host."""

    def __init__(self, host: str, port: int, size: int, *, is_master: bool) -> None:
        """Raises RuntimeError if the store cannot be reached. `port`: 0 on rank 0 takes any free one."""
        self.store = TCPStore(host, port, size, is_master, datetime.timedelta(seconds=_START_S), wait_for_workers=False)

    @property
    def port(self) -> int:
        return int(self.store.port)
