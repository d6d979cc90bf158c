"""The one copy of a step: what is added comes out on the device, aligned, whatever its type and order."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_svc.steps.step_upload import StepUpload

CPU = torch.device("cpu")
DTYPES = (np.bool_, np.int32, np.int64, np.float32, np.float64)


@settings(deadline=None)
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
