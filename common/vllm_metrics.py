"""Figures of a deployment under the names, types and labels of vLLM's metrics, so that its dashboards work as they are.

The deployment counts as one engine, with the number 0, however many workers it has. docs/operations.md lists the names
and what differs. Names that vLLM has given up, and that older dashboards ask for, are here too.
"""

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.core import Metric

from common.metric_families import Labels, counters, gauges, histogram
from quire.stats import Stats

ENGINE = "0"


class _Distribution(NamedTuple):
    name: str
    field: str  # of `Distributions`
    about: str


_DISTRIBUTIONS = tuple(
    _Distribution(f"vllm:{name}", field, about)
    for name, field, about in (
        ("time_to_first_token_seconds", "first_token_s", "Seconds from a request's arrival to its first token."),
        ("inter_token_latency_seconds", "token_s", "Seconds from one token of a request to the next."),
        ("time_per_output_token_seconds", "token_s", "Older name of vllm:inter_token_latency_seconds."),
        ("request_time_per_output_token_seconds", "mean_token_s", "Mean seconds between tokens, by request."),
        ("e2e_request_latency_seconds", "total_s", "Seconds from a request's arrival to its end."),
        ("request_queue_time_seconds", "queue_s", "Seconds from a request's arrival to its first step."),
        ("request_inference_time_seconds", "inference_s", "Seconds from a request's first step to its end."),
        ("request_prefill_time_seconds", "prefill_s", "Seconds from a request's first step to its first token."),
        ("request_decode_time_seconds", "decode_s", "Seconds from a request's first token to its end."),
        ("request_prompt_tokens", "prompt_tokens", "Tokens of a request's prompt."),
        ("request_prefill_kv_computed_tokens", "computed_prompt_tokens", "Prompt tokens not found in the cache."),
        ("request_generation_tokens", "output_tokens", "Tokens of a request's output."),
        ("request_max_num_generation_tokens", "longest_output_tokens", "Tokens of a request's longest sample."),
        ("request_params_n", "num_samples", "Samples that a request asked for."),
        ("request_params_max_tokens", "max_tokens", "Bound of a request's output, in tokens."),
        ("iteration_tokens_total", "step_tokens", "Tokens computed in one step."),
    )
)


def vllm_numbers(stats: Stats) -> Iterator[Metric]:
    """The gauges and counters of a snapshot."""
    labels = _labels(stats)
    yield from _gauges(stats, labels)
    yield from _counters(stats, labels)
    yield _cache_config(stats)


def vllm_histograms(stats: Stats) -> Iterator[Metric]:
    """The histograms of a snapshot."""
    for each in _DISTRIBUTIONS:
        yield histogram(each.name, each.about, _labels(stats), getattr(stats.distributions, each.field))


def _labels(stats: Stats) -> Labels:
    return {"model_name": stats.model_name, "engine": ENGINE}


def _gauges(stats: Stats, labels: Labels) -> Iterator[Metric]:
    blocks = stats.blocks
    host_blocks = sum(each.host_blocks for each in stats.workers)
    used_host_blocks = sum(each.used_host_blocks for each in stats.workers)
    kv_usage, host_usage = _ratio(blocks.used, blocks.total), _ratio(used_host_blocks, host_blocks)
    for name, about, value in (
        ("num_requests_running", "Requests that run.", stats.num_running),
        ("num_requests_waiting", "Requests that wait, preempted ones included.", stats.num_waiting),
        ("num_requests_swapped", "Requests that wait with their blocks in a host pool.", stats.num_swapped),
        ("kv_cache_usage_perc", "Used part of the KV blocks; 1 is all.", kv_usage),
        ("gpu_cache_usage_perc", "Older name of vllm:kv_cache_usage_perc.", kv_usage),
        ("cpu_cache_usage_perc", "Used part of the host pools' blocks; 1 is all.", host_usage),
    ):
        yield gauges(f"vllm:{name}", about, [(labels, value)])


def _counters(stats: Stats, labels: Labels) -> Iterator[Metric]:
    work, ends = stats.work, stats.ends
    for name, about, value in (
        ("prefix_cache_queries", "Tokens looked up in the prefix cache.", work.prefix_query_tokens),
        ("prefix_cache_hits", "Tokens found in the prefix cache.", work.prefix_hit_tokens),
        ("num_preemptions", "Preemptions of requests.", work.num_preemptions),
        ("prompt_tokens", "Tokens of the prompts of accepted requests.", stats.prompt_tokens),
        ("generation_tokens", "Tokens generated.", stats.output_tokens),
    ):
        yield counters(f"vllm:{name}", about, [(labels, value)])
    reasons = {"stop": ends.stop, "length": ends.length, "abort": ends.cancelled + ends.expired, "error": ends.failed}
    by_reason = [({**labels, "finished_reason": reason}, number) for reason, number in reasons.items()]
    yield counters("vllm:request_success", "Requests that ended, by reason.", by_reason)


def _cache_config(stats: Stats) -> Metric:
    labels = {
        "engine": ENGINE,
        "block_size": str(stats.blocks.block_size),
        "num_gpu_blocks": str(stats.blocks.total),
        "num_cpu_blocks": str(sum(each.host_blocks for each in stats.workers)),
        "enable_prefix_caching": str(stats.prefix_cache),
    }
    return gauges("vllm:cache_config_info", "Sizes of the KV memory of all workers together.", [(labels, 1)])


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
