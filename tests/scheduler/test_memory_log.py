"""The operator's lines on the use of the KV memory."""

from structlog.testing import capture_logs

from scheduler_svc.core.scheduler_config import SchedulerConfig
from scheduler_svc.workers.memory_log import EVERY_S, MemoryLog
from tests.scheduler.core_cluster import Cluster
from tests.scheduler.test_scheduler_pausing import complete_all, pause
from tests.scheduler.test_scheduler_swap import PROMPT, make_cluster


def test_a_line_for_each_busy_worker_comes_now_and_then_and_none_while_nothing_runs() -> None:
    cluster = Cluster(SchedulerConfig(watermark=0.0, pipeline_depth=1))
    cluster.add_worker("busy", num_blocks=20)
    memory_log = MemoryLog()

    def lines_at(now_s: float) -> list[str]:
        with capture_logs() as lines:
            memory_log.write_if_due(now_s, cluster.scheduler)
        assert all(line["event"] == "memory" for line in lines)
        return [line["worker_id"] for line in lines]

    assert lines_at(1000.0) == lines_at(1000.0 + EVERY_S) == []
    cluster.add_group([1, 2, 3, 4, 5, 6], 3, 8)
    cluster.step("busy")
    cluster.add_worker("idle", num_blocks=20)
    assert lines_at(1000.0 + 2 * EVERY_S - 1) == []
    assert lines_at(1000.0 + 2 * EVERY_S) == ["busy"]
    assert lines_at(1000.0 + 2 * EVERY_S + 1) == []
    cluster.run_until_idle()
    assert lines_at(1000.0 + 9 * EVERY_S) == []


def test_a_worker_has_a_line_while_all_that_it_holds_is_on_its_host() -> None:
    cluster = make_cluster()
    group = cluster.add_group(PROMPT, 1, 9)
    cluster.step()
    cluster.step()
    pause(cluster, group)
    complete_all(cluster)
    memory_log = MemoryLog()
    memory_log.write_if_due(0.0, cluster.scheduler)
    with capture_logs() as lines:
        memory_log.write_if_due(EVERY_S, cluster.scheduler)
    assert [(line["num_running"], line["num_used_host_blocks"]) for line in lines] == [(0, 2)]


def test_a_line_says_what_is_shared_and_what_was_done() -> None:
    cluster = Cluster(SchedulerConfig(watermark=0.0, pipeline_depth=1))
    cluster.add_worker(num_blocks=20)
    cluster.add_group([1, 2, 3, 4, 5, 6], 3, 8)
    cluster.step()
    cluster.step()
    memory_log = MemoryLog()
    memory_log.write_if_due(0.0, cluster.scheduler)
    with capture_logs() as lines:
        memory_log.write_if_due(EVERY_S, cluster.scheduler)
    (line,) = lines
    # A shared block of the prompt, and the half-filled one copied for two of the three.
    assert (line["num_used_blocks"], line["num_shared_blocks"], line["num_saved_blocks"]) == (4, 1, 2)
    assert (line["num_copied_blocks"], line["num_swaps"], line["num_running"]) == (2, 0, 3)
