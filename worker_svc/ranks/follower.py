"""The work of a rank other than 0: block moves and passes as rank 0 says, in its order.

It keeps weights and KV blocks, and no seats; it samples nothing and answers nothing.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from kernels.native.shared_ranks import RankReduction
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.memory.kv_pool import KVPool
from worker_svc.ranks.pass_codec import decode_pass, decode_rows
from worker_svc.ranks.rank_connection import FrameKind, RankConnection, RankLostError


class Follower:
    """One rank's model and KV pool."""

    def __init__(
        self,
        model: HostDecoder,
        kv_pool: KVPool,
        reduction: RankReduction,
        after_first_pass: Callable[[], None] = lambda: None,
    ) -> None:
        self._model = model
        self._after_pass = after_first_pass
        self._kv_pool = kv_pool
        self._reduction = reduction
        self._hidden: Tensor | None = None  # of the last pass

    def serve(self, connection: RankConnection) -> None:
        """Follow rank 0 until it is gone. Raises RankLostError then, or if a rank did not come in time."""
        while True:
            kind, payload = connection.receive()
            with torch.inference_mode():
                self._execute(kind, payload)
            if self._reduction.has_failed:
                raise RankLostError("a rank of the group did not come to the end of a pass")

    def _execute(self, kind: FrameKind, payload: bytes) -> None:
        match kind:
            case FrameKind.PASS:
                order = decode_pass(payload)
                self._hidden = self._model.hidden(order.batch, self._kv_pool)
                if order.with_logits:
                    self._model.logits(self._hidden)
                self._after_pass()
                self._after_pass = lambda: None
            case FrameKind.LOGITS:
                assert self._hidden is not None, "a pass comes first"
                self._model.logits(self._hidden[decode_rows(payload)])
            case FrameKind.SWAP_OUT:
                self._kv_pool.swap_out(_pairs(payload))
            case FrameKind.SWAP_IN:
                self._kv_pool.swap_in(_pairs(payload))
            case FrameKind.COPY:
                self._kv_pool.copy_blocks(_pairs(payload))
            case _:
                raise RankLostError(f"a frame {kind.name} came in the midst of steps")


def _pairs(payload: bytes) -> list[tuple[int, int]]:
    return [(first, second) for first, second in np.frombuffer(payload, dtype="<i4").reshape(-1, 2).tolist()]
