"""`/metrics` of gateway, scheduler and worker: what vLLM's dashboard asks for has data, and ours stands beside it."""

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import httpx2
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

import quire
from benchmarks.report import ROOT
from tests.gateway.conftest import MODEL
from tests.patience import MOST_ATTEMPTS, patient
from tests.services import RunningServices, Service, running_services, start_gateway
from worker_svc.service.worker_figures import WorkerFigures

# What the panels of vLLM's Grafana dashboard query, in its examples/observability/prometheus_grafana.
DASHBOARD = [
    "vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_count",
    "vllm:e2e_request_latency_seconds_sum", "vllm:generation_tokens_total", "vllm:inter_token_latency_seconds_bucket",
    "vllm:inter_token_latency_seconds_count", "vllm:inter_token_latency_seconds_sum", "vllm:kv_cache_usage_perc",
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prompt_tokens_total",
    "vllm:request_decode_time_seconds_sum", "vllm:request_generation_tokens_bucket",
    "vllm:request_max_num_generation_tokens_sum", "vllm:request_prefill_time_seconds_sum",
    "vllm:request_prompt_tokens_bucket", "vllm:request_queue_time_seconds_sum", "vllm:request_success_total",
    "vllm:time_to_first_token_seconds_bucket", "vllm:time_to_first_token_seconds_count",
    "vllm:time_to_first_token_seconds_sum",
]  # fmt: skip
# Of the older versions of that dashboard, and of those beside it.
OLDER = [
    "vllm:time_per_output_token_seconds_bucket", "vllm:gpu_cache_usage_perc", "vllm:cpu_cache_usage_perc",
    "vllm:num_requests_swapped", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:num_preemptions_total", "vllm:request_inference_time_seconds_bucket", "vllm:request_params_n_bucket",
    "vllm:request_params_max_tokens_bucket", "vllm:iteration_tokens_total_bucket",
    "vllm:request_time_per_output_token_seconds_bucket",
]  # fmt: skip
OURS = [
    "quire_kv_blocks", "quire_kv_waste_ratio", "quire_kv_sharing_ratio", "quire_preemptions_total",
    "quire_copied_blocks_total", "quire_swapped_blocks_total", "quire_step_overhead_seconds_bucket",
    "quire_journal_write_seconds_bucket",
]  # fmt: skip

OLDER_NAMES = ("vllm:gpu_cache_usage_perc", "vllm:time_per_output_token_seconds")

Samples = dict[str, dict[tuple[tuple[str, str], ...], float]]  # by name, then by labels


class LaunchedPasses:
    """Passes of a runner of accelerators."""

    graph_passes: Mapping[str, int] = {"decode": 1}
    kernel_passes: Mapping[str, int] = {"no_graphs": 1}


class Deployed(RunningServices):
    """Services of which scheduler and worker listen for scrapes."""

    def preempt_some(self) -> None:
        """Run more sequences than the pool holds at their end."""
        with quire.Client(self.address) as sdk:
            prompts = (f"{word} upon" for word in ("Once", "One", "Two", "A"))
            streams = [sdk.stream(each, max_tokens=200, n=2, ignore_eos=True) for each in prompts]
            for stream in streams:
                stream.completion()


@contextmanager
def deployed() -> Iterator[Deployed]:
    listen = ("--metrics-listen", "127.0.0.1:0")
    pool = ("--num-blocks", "40", "--num-host-blocks", "8")
    options = ("--dtype", "float32", "--threads", "1", *pool, "--model-name", MODEL, *listen)
    with running_services(*options, scheduler_options=listen) as services:
        yield Deployed(*services)


@pytest.fixture(scope="module")
def services() -> Iterator[Deployed]:
    with deployed() as running:
        yield running


def scraped(url: str) -> Samples:
    answer = httpx2.get(f"{url}/metrics", timeout=30)
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    found: Samples = {}
    for family in text_string_to_metric_families(answer.text):
        for sample in family.samples:
            by_labels = found.setdefault(sample.name, {})
            labels = tuple(sorted(sample.labels.items()))
            assert labels not in by_labels, f"{sample.name} {labels} stands there twice"
            by_labels[labels] = sample.value
    return found


def once(url: str, holds: Callable[[Samples], bool]) -> Samples:
    """A scrape for which this holds."""
    deadline_s = time.monotonic() + patient(30)
    while not holds(found := scraped(url)):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.05)
    return found


def families_at(url: str) -> dict[str, str]:
    """Names of all families of a scrape, counters' with `_total`, and the type of each."""
    families = text_string_to_metric_families(httpx2.get(f"{url}/metrics", timeout=30).text)
    return {f"{each.name}_total" if each.type == "counter" else each.name: each.type for each in families}


def documented_families() -> dict[str, str]:
    """The same as the tables of docs/operations.md have it."""
    page = (ROOT / "docs" / "operations.md").read_text()
    found = dict.fromkeys(OLDER_NAMES, "gauge") | {OLDER_NAMES[1]: "histogram"}
    for prefix, table in re.findall(r"^\| `(vllm:|quire_)` \|.*\n((?:\|.*\n)+)", page, re.MULTILINE):
        for names, kind in re.findall(r"^\| (`[^|]*`) \| (\w+) \|", table, re.MULTILINE):
            found |= {prefix + name: kind for name in re.findall(r"`(\w+)`", names)}
    return found


def total(samples: Samples, name: str, **labels: str) -> float:
    return sum(value for key, value in samples.get(name, {}).items() if labels.items() <= dict(key).items())


def is_idle(samples: Samples) -> bool:
    return total(samples, "quire_requests_admitted_total") == total(samples, "vllm:request_success_total")


def has_calls_and_is_idle(samples: Samples) -> bool:
    return is_idle(samples) and total(samples, "http_requests_total") > 0


def listener(service: Service) -> str:
    return f"http://{service.wait_for('metrics')['address']}"


def has_load_or_is_late(sdk: quire.Client, request_id: str, samples: Samples) -> bool:
    """True if a request runs and two have ended; or if this one, which should run, has ended."""
    if total(samples, "vllm:e2e_request_latency_seconds_count") < 2:
        return False
    return total(samples, "vllm:num_requests_running") == 1 or sdk.get(request_id).state is quire.RequestState.FINISHED


def test_every_query_of_vllms_dashboard_has_data_under_load(
    services: Deployed,
) -> None:
    address, url = services.address, services.url
    with quire.Client(address) as sdk, openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as api:
        for _ in range(2):  # the second finds the prompt of the first in the cache
            api.completions.create(model=MODEL, prompt="Once upon a time " * 12, max_tokens=6, n=2)
        for _ in range(MOST_ATTEMPTS):
            with sdk.stream("Once", max_tokens=400, ignore_eos=True) as stream:
                next(iter(stream))
                found = once(url, partial(has_load_or_is_late, sdk, stream.request_id))
            if total(found, "vllm:num_requests_running") == 1:
                break
        assert total(found, "vllm:num_requests_running") == 1
        assert 0 < total(found, "vllm:kv_cache_usage_perc") < 1
    for name in DASHBOARD + OLDER:
        assert found.get(name), name
        for labels in found[name]:
            assert {("model_name", MODEL), ("engine", "0")} <= set(labels), name
    for name in OURS:
        assert found.get(name), name
    histograms = {name.removesuffix("_count") for name in found if name.startswith("vllm:") and name.endswith("_count")}
    for name in histograms:
        assert total(found, f"{name}_count") > 0, name
        assert total(found, f"{name}_bucket", le="+Inf") == total(found, f"{name}_count"), name


def test_ends_are_counted_by_reason(services: Deployed) -> None:
    address, url = services.address, services.url
    before = once(url, is_idle)
    with quire.Client(address) as sdk:
        sdk.generate("Once", max_tokens=3)
        sdk.generate("Once", max_tokens=30, allowed_token_ids=[7], stop_token_ids=[7])
        with sdk.stream("Once", max_tokens=400, ignore_eos=True) as stream:
            next(iter(stream))
        with pytest.raises(quire.RequestExpiredError):
            sdk.generate("Once", max_tokens=400, ignore_eos=True, timeout_s=0.05)

    def ended(samples: Samples, reason: str) -> float:
        now, then = (total(each, "vllm:request_success_total", finished_reason=reason) for each in (samples, before))
        return now - then

    once(url, lambda samples: [ended(samples, each) for each in ("stop", "length", "abort", "error")] == [1, 1, 2, 0])


def test_each_gateway_gives_the_deployments_figures_and_its_own_under_its_process(
    services: Deployed,
) -> None:
    other, other_url = start_gateway(services.address)
    with other:
        httpx2.get(f"{other_url}/no/such/{'x' * 50}", timeout=patient(60))
        found = [once(each, has_calls_and_is_idle) for each in (services.url, other_url)]
    first, second = (each["vllm:generation_tokens_total"] for each in found)
    assert first == second
    pids = [dict(next(iter(each["quire_http_open_calls"])))["process"] for each in found]
    assert pids == [str(services.gateway.process.pid), str(other.process.pid)]
    assert total(found[1], "http_requests_total", handler="none", status="4xx", process=pids[1]) == 1
    assert total(found[1], "process_resident_memory_bytes", process=pids[1]) > 0


def test_scheduler_and_worker_answer_at_their_own_listeners(
    services: Deployed,
) -> None:
    with quire.Client(services.address) as sdk:
        sdk.generate("Once", max_tokens=3)
    found = scraped(listener(services.scheduler))
    assert total(found, "quire_leading") == 1
    at_gateway = scraped(services.url)
    http = {name for name in at_gateway if name.startswith(("http_", "quire_http_"))}
    assert set(at_gateway) - set(found) == {"quire_scheduler_up", *http}
    steps = scraped(listener(services.worker))
    assert total(steps, "quire_worker_ready") == 1
    assert total(steps, "quire_worker_steps_total", status="ok") == total(steps, "quire_worker_step_seconds_count") > 0
    [labels] = steps["quire_worker_info"]
    assert {("model_name", MODEL), ("num_blocks", "40"), ("num_host_blocks", "8")} <= set(labels)


def test_the_page_of_operations_lists_every_figure_with_its_type(services: Deployed) -> None:
    figures = WorkerFigures()
    figures.passes = LaunchedPasses()
    with_device_runner = {f"{each.name}_total": each.type for each in figures.read() if "passes" in each.name}
    found = with_device_runner | families_at(listener(services.worker))
    found |= families_at(listener(services.scheduler)) | families_at(services.url)
    ours = {name: kind for name, kind in found.items() if name.startswith(("vllm:", "quire_"))}
    assert ours == documented_families()


def test_counters_do_not_fall_when_a_worker_leaves_and_scrapes_go_on_without_a_scheduler() -> None:
    with deployed() as services:
        services.preempt_some()
        before = once(services.url, is_idle)
        assert total(before, "quire_preemptions_total") == total(before, "vllm:num_preemptions_total") > 0
        assert sum(total(before, "quire_kv_blocks", state=state) for state in ("used", "cached", "free")) == 40
        services.worker.kill()
        after = once(services.url, lambda samples: total(samples, "quire_worker_in_service") == 0)
        for name in ("vllm:prefix_cache_queries_total", "vllm:num_preemptions_total", "quire_copied_blocks_total"):
            assert total(after, name) == total(before, name) > 0, name
        services.scheduler.kill()
        found = once(services.url, lambda samples: total(samples, "quire_scheduler_up") == 0)
    assert not any(name.startswith("vllm:") for name in found)
    assert total(found, "http_requests_total") > 0
