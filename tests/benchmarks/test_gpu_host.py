"""The benchmark of the host's part of a step on a GPU: what it launches by kind, and all of it in small."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.host.section import section_of
from benchmarks.gpu.host.step_launches import StepLaunches, count_launches
from benchmarks.report import ROOT

SAMPLING_LAUNCHES = 50  # more than any kind of sampling takes

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def launches() -> list[StepLaunches]:
    return count_launches()


def test_every_kind_of_step_is_one_graph_and_few_launches(launches: list[StepLaunches]) -> None:
    graphs = [each for each in launches if each.by_graph]
    assert {each.graphs for each in graphs} == {1}
    assert max(each.kernels + each.operations for each in graphs) < SAMPLING_LAUNCHES


def test_without_graphs_each_layer_is_launched_kernel_by_kernel(launches: list[StepLaunches]) -> None:
    """A layer has four products, two norms, an activation, the rotation, and one or two kernels of attention."""
    apart = [each for each in launches if not each.by_graph]
    assert {each.kind for each in apart} == {each.kind for each in launches}
    assert {each.graphs for each in apart} == {0}
    assert min(each.operations for each in apart) >= 4 * 32
    assert min(each.kernels for each in apart) >= 5 * 32
    by_kind = {each.kind: each.kernels for each in apart}
    assert by_kind["mixed"] == by_kind["decode, temperature"] + 32 + 1  # prefill attention, and inputs of rows


def test_no_step_waits_for_the_device_or_for_the_compiler(launches: list[StepLaunches]) -> None:
    assert not any(each.reads for each in launches)
    assert not any(each.compiled for each in launches)


def test_the_whole_benchmark_in_small(tmp_path: Path) -> None:
    """Times say nothing on a loaded machine; but a graph saves the host most of its work on any."""
    command = [sys.executable, "-m", "benchmarks.gpu.host", "--steps", "3", "--out", str(tmp_path)]
    subprocess.run(command, check=True, cwd=ROOT, capture_output=True, timeout=300)
    document = json.loads((tmp_path / "host_cost.json").read_text())
    costs = {(row["load"], row["by_graph"]): row["launch_ms"] for row in document["costs"]}
    loads = {load for load, _ in costs}
    assert len(loads) == 5
    assert all(costs[load, True] < costs[load, False] for load in loads)
    section = section_of(document)
    assert len(section.headlines) == 3
    assert "decode, swaps" in section.blocks[-1]
