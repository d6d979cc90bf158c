"""The promises, under faults drawn from seeds. A seed that fails here fails again wherever it is run."""

import pytest

from tests.simulation.campaign import num_cores, outcomes, told

NUM_FIRST = 50
NUM_SEEDS = 250
NUM_COMPARED = 20


@pytest.mark.timeout(900)
def test_every_promise_holds_in_the_first_seeds() -> None:
    hold_every_promise(range(NUM_FIRST))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_promise_holds_in_more_seeds() -> None:
    hold_every_promise(range(NUM_FIRST, NUM_SEEDS))


def hold_every_promise(seeds: range) -> None:
    failed = [told(each) for each in outcomes(seeds, num_cores()) if each.violations]
    assert not failed, "\n".join(failed)


@pytest.mark.long
def test_a_seed_is_the_same_run_in_every_process() -> None:
    """Each pool has processes of its own, whose strings have other hashes."""
    seeds = range(NUM_SEEDS, NUM_SEEDS + NUM_COMPARED)
    once, again = (list(outcomes(seeds, 1)) for _ in range(2))
    assert [each.digest for each in once] == [each.digest for each in again]
    assert len({each.digest for each in once}) == NUM_COMPARED
    assert any(each.num_lives > 2 for each in once)


@pytest.mark.long
def test_a_store_that_breaks_its_word_is_found_out() -> None:
    """The store acknowledges one entry in ten without keeping it."""
    found = [each for each in outcomes(range(10), 1, forgets=0.1) if each.violations]
    assert len(found) > 5


def test_stock_is_taken_again_if_the_scheduler_finds_meanwhile_that_it_leads_no_more() -> None:
    # The leader dies, and the one before it is asked: it is refused at the store, and ends.
    (outcome,) = outcomes([503091], 1)
    assert not outcome.violations
