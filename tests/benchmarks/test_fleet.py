"""Fleets in virtual time, small: nothing is lost whatever dies, all shards are led, two runs are the same, by hand."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.fleet import __main__ as fleet_main
from benchmarks.fleet.costs import (
    FIXED_8_MS,
    GPU_8B,
    REVIEWED_STEPS_MS,
    SchedulerCosts,
    WorkerCosts,
    measured_scheduler,
)
from benchmarks.fleet.fleet import Fleet
from benchmarks.fleet.fleet_config import DETECT_S, FleetConfig
from benchmarks.fleet.fleet_jobs import shard_row, start_row, three_shards_row
from benchmarks.fleet.page import write_page
from benchmarks.fleet.scheduler_process import SchedulerProcess
from benchmarks.fleet.sizing import most_workers
from benchmarks.fleet.timeline import Timeline
from benchmarks.page_section import commits_of
from benchmarks.report import RESULTS, ROOT

FREE = SchedulerCosts(points=((1, 0.0),), turn_part=0.0, request_s=0.0, rebuild_s=0.0, journal_read_s=0.0)
RACKS = FleetConfig(
    num_workers=12,
    num_shards=4,
    num_clients=36,
    worker=GPU_8B,
    scheduler=measured_scheduler(),
    num_racks=4,
    warm_s=1.0,
    rack_fails_s=1.5,
    seconds=12.0,
)


@pytest.mark.long
@pytest.mark.parametrize(("seed", "shards", "racks"), [(0, 2, 2), (1, 3, 3), (2, 5, 2), (3, 5, 8)])
def test_no_request_is_lost_with_a_rack_and_every_shard_is_led_again(seed: int, shards: int, racks: int) -> None:
    """`run` itself asserts the invariants of every core, and that each request has ended or is live."""
    fleet = Fleet(replace(RACKS, seed=seed, num_shards=shards, num_racks=racks))
    outcome = fleet.run()
    assert outcome.num_killed == 0 and fleet.num_stalled == 0
    assert all(shard.led is not None and shard.led.process.is_alive for shard in fleet.shards)
    assert outcome.num_ended > RACKS.num_clients
    assert min(outcome.stalls_s, default=DETECT_S) > 0


def test_two_runs_are_the_same_and_another_seed_is_another_run() -> None:
    short = replace(RACKS, seconds=6.0)
    first = Fleet(short).run()
    assert Fleet(short).run() == first != Fleet(replace(short, seed=21)).run()


def test_a_row_is_the_same_in_a_process_of_its_own() -> None:
    """Such a process gets copies of what describes its job."""
    row = shard_row(pickle.loads(pickle.dumps(FIXED_8_MS)), 8, 1)
    assert row == shard_row(FIXED_8_MS, 8, 1) and row["num_ended"]


def test_what_ran_on_lost_workers_goes_on_when_they_are_missed() -> None:
    """One shard, whose leader is in no rack that fails: stalls last for the time in which a host is missed, and little
    more."""
    config = replace(RACKS, num_shards=1, num_racks=3, seed=4)
    fleet = Fleet(config)
    fleet.processes[0].rack = 1
    stalls = fleet.run().stalls_s
    assert len(stalls) >= 4 and min(stalls) > DETECT_S and max(stalls) < DETECT_S + 0.5


def test_a_worker_alone_gives_what_its_steps_allow() -> None:
    config = FleetConfig(
        num_workers=2,
        num_shards=1,
        num_clients=20,
        worker=FIXED_8_MS,
        scheduler=FREE,
        fixed_lengths=(16, 1000),
    )
    outcome = Fleet(config).run()
    assert outcome.rate(2.0, 4.0) == pytest.approx(20 / 8e-3, rel=0.01)
    assert outcome.worker_busy_s == pytest.approx(2 * 2.0, rel=0.01)


def test_a_full_scheduler_gives_what_its_cpu_time_allows() -> None:
    """Each step costs 2 ms: 500 steps a second, of ten rows on average, however many workers there are."""
    costs = replace(FREE, points=((1, 2e-3), (80, 2e-3)))
    config = FleetConfig(
        num_workers=8, num_shards=1, num_clients=80, worker=FIXED_8_MS, scheduler=costs, fixed_lengths=(16, 1000)
    )
    outcome = Fleet(config).run()
    assert outcome.rate(2.0, 4.0) == pytest.approx(5000, rel=0.02)
    assert outcome.scheduler_busy_s == pytest.approx(2.0, rel=0.01)


def test_three_shards_give_at_least_2_8_times_one() -> None:
    assert three_shards_row(32)["ratio"] >= 2.8


def test_a_start_spreads_shards_and_workers() -> None:
    row = start_row(30, 6)
    assert row["one_each_s"] is not None and row["all_serve_s"] is not None and row["is_even"]


def test_the_model_of_a_gpu_is_near_the_steps_that_it_is_made_of() -> None:
    for (rows, context), step_ms in REVIEWED_STEPS_MS.items():
        assert 1e3 * GPU_8B.of(rows, rows, rows * context) == pytest.approx(step_ms, rel=0.07)


def test_a_scheduler_costs_what_was_measured_and_lies_between() -> None:
    costs = replace(FREE, points=((8, 1e-3), (16, 2e-3)), factor=0.5)
    assert [round(1e3 * costs.of_step(rows), 6) for rows in (1, 8, 12, 16, 32)] == [0.5, 0.5, 0.75, 1.0, 2.0]


@pytest.mark.parametrize("name", ["request_s", "rebuild_s", "journal_read_s"])
def test_no_work_costs_less_than_nothing(name: str) -> None:
    """A difference of two measurements may be negative where they are of different runs."""
    assert getattr(measured_scheduler(), name) > 0
    with pytest.raises(ValueError, match=f"less than nothing.*{name}=-1e-06"):
        replace(FREE, **cast(Any, {name: -1e-6}))
    with pytest.raises(ValueError, match="less than nothing"):
        replace(FREE, points=((1, -1e-6),))


def test_a_process_does_one_thing_after_another_until_it_is_killed() -> None:
    timeline = Timeline()
    process = SchedulerProcess("s", 0, timeline)
    done: list[float] = []

    def job() -> float:
        done.append(timeline.now_s)
        return 1.0

    for _ in range(3):
        process.post(job)
    timeline.run_until(1.5)
    assert done == [0.0, 1.0] and process.busy_s == 2.0
    process.kill()
    timeline.run_until(9.0)
    assert done == [0.0, 1.0]


def test_the_most_workers_are_the_last_that_give_enough() -> None:
    rows = [{"num_workers": number, "tokens_per_s": rate} for number, rate in ((1, 100), (2, 199), (3, 290), (4, 300))]
    assert most_workers(rows) == 3


def test_prompts_and_context_cost_what_the_model_says() -> None:
    costs = WorkerCosts(name="", step_s=1.0, row_s=0.1, prompt_token_s=0.01, context_token_s=0.001)
    assert costs.of(num_rows=2, num_tokens=12, num_context_tokens=100) == pytest.approx(1.0 + 0.2 + 0.1 + 0.1)


def test_the_page_is_that_of_the_kept_result(tmp_path: Path) -> None:
    write_page(json.loads((RESULTS / "fleet.json").read_text()), tmp_path)
    made = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.*")}
    kept = [ROOT / "docs" / "scaling.md", *(ROOT / "docs" / "scaling").iterdir()]
    assert made == {path.relative_to(ROOT / "docs"): path.read_text() for path in kept}


def test_every_question_keeps_the_commit_that_answered_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "fleet.json"
    for commit, questions in (("a" * 40, ["rack", "shards"]), ("b" * 40, ["rack"])):
        monkeypatch.setattr(fleet_main, "run_jobs", lambda jobs, num_processes: [{} for _ in jobs])
        monkeypatch.setattr(fleet_main, "circumstances", lambda commit=commit: {"command": "x", "commit": commit})
        fleet_main.measure(questions, output, is_quick=True, num_processes=1)
    made_by = json.loads(output.read_text())["made_by"]
    assert {name: how["commit"][0] for name, how in made_by.items()} == {"shards": "a", "rack": "b"}


def test_the_kept_result_names_the_commit_of_every_question() -> None:
    document = json.loads((RESULTS / "fleet.json").read_text())
    assert set(document["made_by"]) == set(document["figures"])
    text = (ROOT / "docs" / "scaling.md").read_text() + (ROOT / "docs" / "results.md").read_text()
    assert all(text.count(f"`{commit[:7]}`") >= 2 for commit in commits_of(document))
