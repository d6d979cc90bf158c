"""The five systems by name, each ready to serve a trace on a given memory."""

from collections.abc import Callable

from benchmarks.lengths import MAX_MODEL_LEN
from benchmarks.paper.cost_model import CostModel
from benchmarks.paper.faster_transformer import FasterTransformer
from benchmarks.paper.orca import RESERVATIONS, Orca
from benchmarks.paper.outcome import Outcome
from benchmarks.paper.published import System
from benchmarks.paper.trace import Trace
from benchmarks.paper.virtual_quire import Beams, QuireConfig, VirtualQuire
from scheduler_svc.core.preemption import PreemptionMode


def serve(
    system: System,
    trace: Trace,
    num_slots: int,
    costs: CostModel,
    *,
    block_size: int = 16,
    preemption: PreemptionMode | None = None,
    beams: Callable[[], Beams] | None = None,
) -> Outcome:
    """Serve the whole trace, from an empty system. The parameters after `costs` are for Quire alone.

    As the paper's did, requests of one sequence are computed again after a preemption, and others swapped.
    """
    if system == "quire":
        preemption = preemption or ("recompute" if trace.width == 1 else "swap")
        config = QuireConfig(num_slots=num_slots, block_size=block_size, preemption=preemption)
        return VirtualQuire(config, costs, beams=beams() if beams is not None else None).serve(trace)
    if system == "fastertransformer":
        return FasterTransformer(num_slots, MAX_MODEL_LEN, costs).serve(trace)
    return Orca(num_slots, RESERVATIONS[system], costs).serve(trace)
