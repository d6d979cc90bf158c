"""Fixtures that tests of both runners share."""

import pytest
import torch

from tests.worker.runners import MAKE_RUNNERS, MakeRunner
from tests.worker.tiny_models import write_tiny_model
from worker_svc.model.decoder import Decoder, load_decoder


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A small LLaMA with groups of query heads, for tests that need no certain model."""
    torch.set_num_threads(1)
    folder = write_tiny_model("llama_gqa", tmp_path_factory.mktemp("model"))
    return load_decoder(folder, torch.float32, torch.device("cpu"))


@pytest.fixture(params=MAKE_RUNNERS)
def make_runner(request: pytest.FixtureRequest) -> MakeRunner:
    return MAKE_RUNNERS[request.param]
