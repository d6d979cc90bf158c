"""Variants of all families on the GPU answer in float32 as `transformers` does, preempted and at both depths."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.on_gpu.families import assert_answers_as_transformers, families_serving, own_share, write_families
from tests.on_gpu.gpu_workers import DEVICE, Served
from tests.worker.tiny_models import TINY_MODELS

SOME = ("opt_350m_style", "llama_biases", "qwen2_window", "gpt2", "olmo2")  # one for each share of `gpu_check`
FAMILIES = own_share(tuple(TINY_MODELS) if DEVICE == "cuda" else SOME)  # two cores would be busy for minutes


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_families(FAMILIES, tmp_path_factory.mktemp("families"))


@pytest.fixture(scope="module")
def served(folders: dict[str, Path]) -> Iterator[dict[str, Served]]:
    with families_serving(folders) as served:
        yield served


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_answers_as_transformers_does(
    family: str, folders: dict[str, Path], served: dict[str, Served]
) -> None:
    assert_answers_as_transformers(served[family], folders[family])
