"""Weights of 8 and 4 bits on real services: a worker with the accelerator's runner answers near the model."""

from collections.abc import Iterator

import pytest

from common.sampling_params import SequenceSampling
from tests.e2e.model_site import ModelSite
from tests.e2e.sampled_reference import Drawing
from tests.services import DEMO_MODEL, Service
from tests.worker.tiny_models import random_prompts

NUM_TOKENS = 16
DRAWINGS = [Drawing(prompt, SequenceSampling(seed=3), NUM_TOKENS) for prompt in random_prompts((5, 16, 33), seed=9)]
NEAR = {"fp8": 0.05, "int4": 0.15}  # mean difference of log-probabilities, in nats
WEIGHT_BYTES = {"fp8": 3_320_320, "int4": 1_767_760}  # of the layers, of 13,107,200 in float32


@pytest.fixture(scope="module")
def site() -> ModelSite:
    return ModelSite(DEMO_MODEL)


@pytest.fixture(scope="module", params=NEAR)
def worker(request: pytest.FixtureRequest, site: ModelSite) -> Iterator[tuple[str, Service]]:
    form: str = request.param
    options = ("--device", "cpu", "--runner", "device", "--num-blocks", "40")  # on a GPU fp8 needs 16 bits
    with site.start_worker("w", *options, "--weight-dtype", form) as worker:
        yield form, worker


async def test_a_worker_answers_near_the_model(site: ModelSite, worker: tuple[str, Service]) -> None:
    form, service = worker
    ready = service.wait_for("ready")
    assert (ready["weight_dtype"], ready["dtype"]) == (form, "float32")
    assert ready["weight_bytes"] < WEIGHT_BYTES[form] + 4 * 2048 * 256 + 100_000  # with the embedding and norms
    async with site.client("--max-batched-tokens", "64") as client:
        completions = [await client.generate(each.prompt, **each.request()) for each in DRAWINGS]
    differences = []
    for completion, drawing in zip(completions, DRAWINGS, strict=True):
        expected = drawing.expected(site.reference, completion.samples[0]).logprobs
        found = [each.logprob for each in completion.samples[0].logprobs]
        differences += [abs(a - b) for a, b in zip(expected, found, strict=True)]
    assert sum(differences) / len(differences) < NEAR[form]
