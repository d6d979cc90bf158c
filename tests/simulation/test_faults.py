"""Single faults, given by hand to a few seeds each: that they come about, and that every promise holds."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest

from tests.simulation.campaign import told
from tests.simulation.faults import Fault, Kind
from tests.simulation.run import run_seed

EffectsOf = Callable[[Sequence[Fault]], Counter[str]]

SEEDS = range(6)
STRUCK_S = (1.7, 2.3, 3.1)  # while requests run: the first leader waits for a lease before it serves


def repeated(kind: Kind, *, lasts_s: float = 0.5) -> list[Fault]:
    """Repeat a fault, on other clients, workers and so on each time."""
    return [Fault(kind=kind, at_s=at_s, lasts_s=lasts_s, number=number) for number, at_s in enumerate(STRUCK_S, 1)]


@pytest.fixture(scope="module")
def effects_of() -> Iterator[EffectsOf]:
    """Effects of the faults in all those seeds, none of which fails. Runs in a process with clocks of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:

        def inflict(faults: Sequence[Fault]) -> Counter[str]:
            ran = list(pool.map(partial(run_seed, instead=sorted(faults, key=lambda fault: fault.at_s)), SEEDS))
            failed = [told(outcome) for outcome in ran if outcome.violations]
            assert not failed, "\n".join(failed)
            return sum((Counter(outcome.effects) for outcome in ran), Counter[str]())

        yield inflict


@pytest.mark.parametrize("kind", ["client is unheard", "client hears nothing"])
def test_a_client_leaves_a_path_that_died_on_one_side_without_being_told(effects_of: EffectsOf, kind: Kind) -> None:
    effects = effects_of(repeated(kind))
    assert effects["client's path dies on one side"] > len(SEEDS)
    assert effects["client leaves a path that died on one side"] > len(SEEDS) // 2


def test_a_store_that_is_told_to_end_comes_back_with_all_that_it_took(effects_of: EffectsOf) -> None:
    effects = effects_of(repeated("store is told to end"))
    assert effects["store ends and keeps its journal"] == len(STRUCK_S) * len(SEEDS)


@pytest.mark.parametrize("lasts_s", [0.05, 4.0])
def test_workers_that_are_told_to_end_leave_and_come_back(effects_of: EffectsOf, lasts_s: float) -> None:
    effects = effects_of(repeated("worker is told to end", lasts_s=lasts_s))
    assert effects["worker leaves"] > len(SEEDS)


def test_what_workers_leave_undone_runs_elsewhere_or_again(effects_of: EffectsOf) -> None:
    """Faults with a number divisible by three give workers no time to drain."""
    at_once = [Fault(kind="worker is told to end", at_s=at_s, lasts_s=0.5, number=3) for at_s in STRUCK_S]
    assert effects_of(at_once)["worker leaves with work undone"] > 2 * len(SEEDS)


def test_a_scheduler_that_is_told_to_end_hands_over_to_its_standby(effects_of: EffectsOf) -> None:
    standbys = [Fault(kind="standby starts", at_s=at_s, lasts_s=0.5, number=1) for at_s in (0.1, 1.7)]
    end = Fault(kind="scheduler is told to end", at_s=2.5, lasts_s=0.5, number=1)
    effects = effects_of([*standbys, end])
    assert effects["scheduler hands over"] > len(SEEDS) // 2


def test_standbys_that_are_told_to_end_withdraw(effects_of: EffectsOf) -> None:
    standbys = [Fault(kind="standby starts", at_s=0.1, lasts_s=0.5, number=1)]
    gone = Fault(kind="standby is told to end", at_s=2.2, lasts_s=0.5, number=1)
    end = Fault(kind="scheduler is told to end", at_s=2.3, lasts_s=0.5, number=1)
    effects = effects_of([*standbys, gone, end])
    assert effects["standby leaves"] == len(SEEDS)
    assert not effects["scheduler hands over"]


@pytest.mark.long
@pytest.mark.parametrize("lasts_s", [0.5, 4.0])
def test_single_clocks_are_set_under_schedulers_that_end(effects_of: EffectsOf, lasts_s: float) -> None:
    """Set by half a second and by hours, for each process in turn, with another leader after each."""
    at_s = [1.6 + 0.2 * number for number in range(15)]
    jumps = [Fault(kind="clock jumps", at_s=each, lasts_s=lasts_s, number=n) for n, each in enumerate(at_s, 1)]
    deaths = [Fault(kind="scheduler dies", at_s=each + 0.1, lasts_s=0.5, number=1) for each in at_s[::4]]
    standbys = [Fault(kind="standby starts", at_s=each, lasts_s=0.5, number=1) for each in (0.1, 1.5)]
    effects = effects_of([*standbys, *jumps, *deaths])
    for role in ("scheduler", "store", "worker"):
        assert effects[f"clock of a {role} jumps"] > len(SEEDS)
