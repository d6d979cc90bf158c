"""Runner with the kernels of a CPU: a `ModelRunner` that gets greedy tokens directly and announces each pass."""

from collections.abc import Callable

from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.runner import ModelRunner
from worker_svc.memory.kv_pool import KVPool
from worker_svc.steps.step_limits import StepLimits


class HostRunner(ModelRunner):
    """An `AnnouncingRunner`."""

    def __init__(self, model: HostDecoder, kv_pool: KVPool, limits: StepLimits) -> None:
        super().__init__(model, kv_pool, limits, model.sampling, greedy=model.greedy)
        self._host = model

    @property
    def before_pass(self) -> Callable[[], None]:
        """See AnnouncingRunner."""
        return self._host.before_pass

    @before_pass.setter
    def before_pass(self, announce: Callable[[], None]) -> None:
        self._host.before_pass = announce
