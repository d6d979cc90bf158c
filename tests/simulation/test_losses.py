"""Losses of workers in the simulation: which request may be taken for one that ends workers."""

from tests.simulation.losses import CRASH, Losses


def test_only_a_request_that_was_beside_a_crash_and_alone_at_another_loss_may_be_convicted() -> None:
    losses = Losses()
    losses.record({"beside", "both"}, CRASH)
    losses.record({"alone"}, "connection reset")
    losses.record({"both"}, "ping timeout")
    losses.record({"beside", "alone", "neither"}, "connection reset")
    assert [each for each in ("beside", "alone", "both", "neither") if losses.may_convict(each)] == ["both"]


def test_crashes_alone_convict_no_innocent_request() -> None:
    losses = Losses()
    losses.record({"lone"}, CRASH)
    losses.record({"lone"}, CRASH)
    assert not losses.may_convict("lone")
