"""Masks are waited for while they take little processor time; one that takes more stops no other."""

import threading
import time
from collections.abc import Iterator

import pytest

from worker_svc.sampling.mask_makers import MaskMakers, MaskTask

MOST_CPU_S = 0.05


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def burning(stop: threading.Event, kind: str = "burning") -> MaskTask:
    def burn() -> None:
        while not stop.is_set():
            pass

    return MaskTask(burn, kind)


@pytest.mark.parametrize("num_threads", [1, 3])
def test_what_takes_too_long_is_given_up_and_the_rest_is_made(num_threads: int, stop: threading.Event) -> None:
    makers, made = MaskMakers(num_threads, MOST_CPU_S), list[int]()
    for _ in range(2):
        made.clear()
        first, second = burning(stop, "one"), burning(stop, "other")
        short = [MaskTask(lambda: made.append(1), "short") for _ in range(5)]
        makers.make([first, *short[:2], second, *short[2:]])
        assert first.is_given_up and second.is_given_up
        assert len(made) == 5 and not any(each.is_given_up for each in short)


def test_with_a_task_that_is_given_up_those_of_its_kind_are_that_have_not_begun(stop: threading.Event) -> None:
    makers, made = MaskMakers(1, MOST_CPU_S), list[int]()
    alike = [MaskTask(lambda: made.append(1), "burning") for _ in range(3)]
    makers.make([burning(stop), *alike])
    assert not made and all(each.is_given_up for each in alike)
    again = MaskTask(lambda: made.append(1), "burning")
    makers.make([again])
    assert made and not again.is_given_up


def test_what_takes_long_without_processor_time_is_waited_for() -> None:
    """On a busy machine, every mask may."""
    task = MaskTask(lambda: time.sleep(5 * MOST_CPU_S), "sleeping")
    MaskMakers(1, MOST_CPU_S).make([task])
    assert not task.is_given_up and task.cpu_s < MOST_CPU_S


def test_what_raises_is_kept_with_its_task() -> None:
    def panic() -> None:
        raise BaseException("a panic")

    makers, made = MaskMakers(1, MOST_CPU_S), list[int]()
    task = MaskTask(panic, "panic")
    makers.make([task, MaskTask(lambda: made.append(1), "short")])
    assert str(task.error) == "a panic" and made and not task.is_given_up


def test_tasks_of_one_kind_have_a_limit_together() -> None:
    def work() -> None:
        until_s = time.thread_time() + 0.6 * MOST_CPU_S
        while time.thread_time() < until_s:
            pass

    tasks = [MaskTask(work, "alike") for _ in range(8)]
    other = MaskTask(work, "other")
    MaskMakers(1, MOST_CPU_S).make([*tasks, other])
    assert 2 <= sum(1 for each in tasks if not each.is_given_up) <= 4
    assert not other.is_given_up
