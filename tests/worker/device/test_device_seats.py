"""The tables on the device hold what the host's hold, and the tokens that only the device knows."""

import random

import numpy as np
import pytest
import torch

from common.sampling_params import SequenceSampling
from common.step import Step
from tests.worker.steps import LIMITS, seat_state
from worker_svc.gpu.device_seats import DeviceSeats
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_upload import StepUpload

CPU = torch.device("cpu")
PENALISED = SequenceSampling(seed=0, repetition_penalty=1.5)


class BothTables:
    """Every step goes to the host's table and to the device's; `live` seats of them must agree."""

    def __init__(self, capacity_bytes: int = 1 << 12) -> None:
        self.host = SeatTable(LIMITS)
        self.device = DeviceSeats(LIMITS, CPU)
        self.upload = StepUpload(CPU, {}, capacity_bytes)

    def step(self, **fields: object) -> None:
        step = Step(epoch=1, step_id=1, **fields)  # type: ignore[arg-type]
        checked = self.host.apply(step)
        self.upload.begin()
        changes = self.device.pack(self.upload, step.whole, checked)
        rows = checked.rows
        places = self.upload.add(self.device.places(rows.sample_seats, rows.sample_positions))
        tokens = np.arange(70, 70 + len(rows.sample_seats), dtype=np.int32)
        self.upload.send()
        self.device.apply(changes)
        self.device.write_tokens(places, torch.from_numpy(tokens))
        self.host.advance(rows, tokens.tolist())

    def check(self) -> None:
        counts = self.host.counts
        for seat in np.flatnonzero(counts.live).tolist():
            num_blocks, num_known = counts.num_blocks[seat], counts.num_known[seat]
            ours, theirs = self.device.block_tables[seat, :num_blocks], self.host.block_tables[seat, :num_blocks]
            assert ours.tolist() == theirs.tolist()
            first = 0 if self.host.sampling[seat].needs_history else int(counts.positions[seat])
            ours, theirs = self.device.tokens[seat, first:num_known], self.host.token_ids[seat, first:num_known]
            assert ours.tolist() == theirs.tolist()


@pytest.mark.parametrize("capacity_bytes", [1 << 12, 64])
@pytest.mark.parametrize("seed", range(5))
def test_any_steps_leave_both_tables_alike(seed: int, capacity_bytes: int) -> None:
    generator = random.Random(seed)
    both = BothTables(capacity_bytes)
    both.step(snapshot=True)
    for _ in range(60):
        live = np.flatnonzero(both.host.counts.live).tolist()
        num_blocks = both.host.counts.num_blocks
        free = [seat for seat in range(LIMITS.num_seats) if seat not in live]
        fields: dict[str, list[object]] = {"whole": [], "append_pairs": [], "freed_seats": []}
        for seat in generator.sample(free, min(len(free), generator.choice([0, 1, 2]))):
            position, count = generator.randrange(8), generator.randrange(1, 8)
            sampling = generator.choice([PENALISED, SequenceSampling(seed=1)])
            history = [generator.randrange(100) for _ in range(position)] if sampling.needs_history else ()
            tokens = [generator.randrange(100) for _ in range(count)]
            table = [generator.randrange(32) for _ in range(4)]
            fields["whole"].append(
                seat_state(seat, tokens, table, position=position, sampling=sampling, history=history)
            )
        fields["append_pairs"] = [
            number
            for seat in live
            if generator.random() < 0.3 and num_blocks[seat] < LIMITS.max_blocks
            for number in (seat, generator.randrange(32))
        ]
        both.step(**fields)
        both.check()
        counts = both.host.counts
        missing = counts.num_known - counts.positions
        fits = counts.live & (missing > 0) & (counts.num_blocks * LIMITS.block_size >= counts.num_known)
        fits &= counts.num_known <= LIMITS.max_model_len
        ready = [seat for seat in np.flatnonzero(fits).tolist() if generator.random() < 0.7][:3]
        both.step(rows=ready, num_tokens=[int(missing[seat]) for seat in ready])
        both.check()
        both.step(freed_seats=[seat for seat in np.flatnonzero(counts.live).tolist() if generator.random() < 0.2])
        both.check()
