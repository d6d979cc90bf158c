"""Figures behind /metrics: totals that outlive workers, a standby's, and a listener's address."""

import asyncio
from collections.abc import AsyncIterator

import httpx2
import pytest

from common.metric_families import CONTENT_TYPE, gauges, text_of
from common.metrics_listener import listen_for_scrapes
from quire.listening import ListenError
from scheduler_svc.api.metrics import SchedulerMetrics
from scheduler_svc.core.scheduler_config import SchedulerConfig
from tests.scheduler.core_cluster import Cluster


def test_totals_include_workers_that_have_left() -> None:
    cluster = Cluster(SchedulerConfig(max_num_batched_tokens=64, watermark=0.0))
    for worker_id in ("first", "second"):
        cluster.add_worker(worker_id, num_blocks=12)
        cluster.add([1, 2, 3, 4, 5], 30)
        cluster.add([6, 7, 8, 9, 10], 30)
        cluster.run_until_idle()
        counted = cluster.scheduler.stats().work
        cluster.remove_worker(worker_id)
        assert cluster.scheduler.stats().work == counted
        assert not cluster.scheduler.stats().workers
    assert counted.num_preemptions >= 2 and counted.num_prefix_query_tokens >= 20


def test_a_standby_says_so_and_has_no_figures_of_the_deployment() -> None:
    text = text_of(SchedulerMetrics().read()).decode()
    assert "quire_leading 0.0" in text and "process_cpu_seconds_total" in text
    assert "vllm:" not in text


@pytest.fixture
async def address() -> AsyncIterator[str]:
    yield listen_for_scrapes("127.0.0.1:0", lambda: [gauges("vllm:x", "About.", [({}, 1)])])


@pytest.mark.parametrize(
    "accept",
    [
        "*/*",
        # Prometheus 2: its client for Python writes OpenMetrics without colons in names.
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
        # Prometheus 3
        "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
        "text/plain;version=1.0.0;escaping=underscores;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
    ],
)
async def test_a_listener_answers_from_the_loop_with_names_as_they_are(address: str, accept: str) -> None:
    answer = await asyncio.to_thread(httpx2.get, f"http://{address}/metrics", headers={"accept": accept})
    assert answer.headers["content-type"] == CONTENT_TYPE
    assert "\n# TYPE vllm:x gauge\nvllm:x 1.0\n" in answer.text


async def test_a_listener_ignores_a_query(address: str) -> None:
    answer = await asyncio.to_thread(httpx2.get, f"http://{address}/metrics?name[]=up")
    assert "vllm:x 1.0" in answer.text


async def test_a_port_in_use_is_refused_by_the_flag_that_chooses_it(address: str) -> None:
    with pytest.raises(ListenError, match="--metrics-listen"):
        listen_for_scrapes(address, list)


async def test_a_host_that_is_not_ours_is_refused_too() -> None:
    with pytest.raises(ListenError, match=r"192\.0\.2\.1"):
        listen_for_scrapes("192.0.2.1:0", list)
