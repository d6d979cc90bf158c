"""The one copy of a step: what is added comes out on the device, aligned, whatever its type and order."""

from itertools import count

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from worker_svc.steps.step_upload import StepUpload
from worker_svc.steps.streams import DeviceEvent, DeviceStreams

CPU = torch.device("cpu")
DTYPES = (np.bool_, np.int32, np.int64, np.float32, np.float64)


@given(
    st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3).map(tuple), st.integers(0, 99)),
        max_size=8,
    )
)
def test_all_that_is_added_arrives_even_beyond_the_capacity(
    added: list[tuple[type[np.generic], tuple[int, ...], int]],
) -> None:
    upload = StepUpload(CPU, {"seats": (4, torch.int32)}, capacity_bytes=256)
    for _ in range(6):  # more often than there are stages
        upload.begin()
        upload.put("seats", np.array([7, 8], dtype=np.int32))
        arrays = [np.random.default_rng(seed).integers(0, 99, shape).astype(dtype) for dtype, shape, seed in added]
        views = [upload.add(array) for array in arrays]
        upload.send()
        assert upload.fixed["seats"][:2].tolist() == [7, 8]
        for view, array in zip(views, arrays, strict=True):
            assert view.data_ptr() % min(16, max(1, view.itemsize)) == 0
            np.testing.assert_array_equal(view.numpy(), array)


def test_fixed_arrays_stay_where_they_are_and_others_come_after_them() -> None:
    upload = StepUpload(CPU, {"seats": (3, torch.int32), "keys": (2, torch.int64)}, capacity_bytes=64)
    seats, keys = upload.fixed["seats"], upload.fixed["keys"]
    for start in (0, 10):
        upload.begin()
        added = upload.add(np.arange(5, dtype=np.float32))
        upload.put("keys", np.array([start, start + 1]))
        upload.put("seats", np.arange(start, start + 3, dtype=np.int32))
        upload.send()
        assert (seats.tolist(), keys.tolist()) == ([start, start + 1, start + 2], [start, start + 1])
        assert added.tolist() == [0, 1, 2, 3, 4]


def test_each_step_has_the_whole_capacity_and_what_goes_beyond_it_is_sent_alone() -> None:
    upload = StepUpload(CPU, {"seats": (3, torch.int32)}, capacity_bytes=64)
    together = upload.fixed["seats"].untyped_storage().data_ptr()
    for _ in range(3):
        upload.begin()
        fits = upload.add(np.arange(16, dtype=np.int32))
        beyond = upload.add(np.arange(1, dtype=np.int32))
        assert fits.untyped_storage().data_ptr() == together
        assert beyond.untyped_storage().data_ptr() != together
        upload.send()
        assert fits.tolist() == list(range(16)) and beyond.tolist() == [0]


class NotedEvent(DeviceEvent):
    """An event of a CPU that notes what is done with it."""

    def __init__(self, number: int, notes: list[tuple[str, int]]) -> None:
        super().__init__(CPU)
        self._number = number
        self._notes = notes

    def record(self) -> None:
        self._notes.append(("record", self._number))

    def synchronize(self) -> None:
        self._notes.append(("wait", self._number))


class NotedStreams(DeviceStreams):
    """Streams of a CPU whose events are numbered."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.notes: list[tuple[str, int]] = []
        self._numbers = count()

    def event(self, *, timed: bool = False) -> DeviceEvent:
        return NotedEvent(next(self._numbers), self.notes)


def test_memory_is_packed_again_only_after_its_copy_four_steps_before() -> None:
    streams = NotedStreams()
    upload = StepUpload(CPU, {}, 64, streams)
    for _ in range(5):
        upload.begin()
        upload.add(np.zeros(1, dtype=np.int32))
        upload.send()
    assert streams.notes == [(what, number) for number in (0, 1, 2, 3, 0) for what in ("wait", "record")]


def test_what_is_sent_alone_is_kept_from_later_changes() -> None:
    upload = StepUpload(CPU, {}, 16)
    upload.begin()
    values = np.arange(10, dtype=np.int32)
    alone = upload.add(values)
    values[:] = 0
    assert alone.tolist() == list(range(10))


def test_each_array_begins_at_a_multiple_of_sixteen_bytes() -> None:
    upload = StepUpload(CPU, {"a": (5, torch.int32), "b": (1, torch.int64)}, capacity_bytes=17)
    upload.begin()
    views = [upload.fixed["a"], upload.fixed["b"], *(upload.add(np.zeros(1, dtype=np.bool_)) for _ in range(2))]
    first = views[0].data_ptr()
    assert [view.data_ptr() - first for view in views] == [0, 32, 48, 64]
    assert views[0].untyped_storage().nbytes() == 80
