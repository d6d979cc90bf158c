"""Sampling parameters that the model recommends, in requests that leave them out."""

from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.v1 import inference_pb2 as pb
from scheduler_svc.journal.memory_store import MemoryStore
from scheduler_svc.requests.params.sampling_defaults import check_defaults, with_defaults
from tests.scheduler.journal_setup import entries_of
from tests.scheduler.scripted_worker import ScriptedWorker
from tests.scheduler.serving_site import Site, counting, running_site, tokens_in

ALL = {"temperature": 0.5, "top_k": 20, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}


def defaults(**fields: Any) -> pb.SamplingParams:
    return pb.SamplingParams(**fields)


def request(**sampling: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="x", sampling=pb.SamplingParams(**sampling))


def said(request: pb.GenerateRequest) -> dict[str, Any]:
    return {field.name: value for field, value in request.sampling.ListFields()}


@pytest.fixture
def worker() -> ScriptedWorker:
    made = ScriptedWorker()
    made.description.model.sampling_defaults.CopyFrom(defaults(**ALL))
    return made


@pytest.fixture
async def site(worker: ScriptedWorker) -> AsyncIterator[Site]:
    async with running_site() as made:
        await made.start_worker(worker)
        yield made


def drawn(worker: ScriptedWorker) -> pb.SamplingParams:
    """Numeric sampling parameters of the last request."""
    return [state.sampling.numbers for step in worker.steps for state in step.whole][-1]


def test_what_a_request_leaves_out_is_filled_in_and_what_it_says_stays() -> None:
    assert said(with_defaults(request(), defaults(**ALL))) == ALL
    for name in ALL:
        assert said(with_defaults(request(**{name: 1}), defaults(**ALL))) == {**ALL, name: 1}
    assert said(with_defaults(request(seed=7), defaults(top_k=20))) == {"seed": 7, "top_k": 20}


def test_the_clients_own_message_is_not_changed() -> None:
    mine = request()
    with_defaults(mine, defaults(**ALL))
    assert not said(mine)
    assert with_defaults(mine, defaults()) is mine
    complete = request(**ALL)
    assert said(with_defaults(complete, defaults(**{**ALL, "top_k": 5}))) == ALL


@pytest.mark.parametrize("greedy", [request(temperature=0), request()])
def test_a_greedy_request_takes_only_the_penalty(greedy: pb.GenerateRequest) -> None:
    own = said(greedy)
    filled = with_defaults(greedy, defaults(**{**ALL, "temperature": 0.0}))
    assert said(filled) == {**own, "temperature": 0.0, "repetition_penalty": 1.5}


def test_beams_take_only_the_penalty_since_all_else_is_refused_beside_them() -> None:
    beams = pb.GenerateRequest(text="x", beam=pb.BeamParams(beam_width=2))
    assert said(with_defaults(beams, defaults(**ALL))) == {"repetition_penalty": 1.5}


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": -0.5},
        {"repetition_penalty": 0.0},
    ],
)
def test_defaults_that_no_request_could_ask_for_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        check_defaults(defaults(**wrong))
    check_defaults(defaults(**ALL))


async def test_a_worker_that_recommends_what_cannot_be_does_not_serve() -> None:
    async with running_site() as site:
        worker = ScriptedWorker()
        worker.description.model.sampling_defaults.top_p = 7.0
        await worker.start()
        site.on_close(worker.stop)
        await site.cluster.Register(worker.registration())
        await site.until_nobody_is_left()
        assert site.admission.model is None


async def test_the_worker_draws_by_the_models_defaults(site: Site, worker: ScriptedWorker) -> None:
    plain = counting(40, 2)
    plain.ClearField("sampling")
    await site.run(plain)
    sampling = drawn(worker)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 20, 0.75)
    assert (sampling.min_p, sampling.repetition_penalty) == (0.25, 1.5)
    own = counting(40, 2)
    own.sampling.temperature, own.sampling.top_p = 2.0, 1.0
    await site.run(own)
    assert (drawn(worker).temperature, drawn(worker).top_k) == (2.0, 20)


async def test_clients_are_told_of_the_defaults(site: Site) -> None:
    model = await site.inference.GetModel(pb.GetModelRequest())
    assert model.sampling_defaults == defaults(**ALL)


async def test_the_same_request_again_is_the_same_request(site: Site) -> None:
    once = await site.run(counting(40, 3, "r1"))
    assert tokens_in(await site.run(counting(40, 3, "r1"))) == tokens_in(once) == [41, 42, 43]


async def test_a_request_is_journalled_with_the_defaults_that_it_was_admitted_with(worker: ScriptedWorker) -> None:
    store = MemoryStore()
    async with running_site(store) as site:
        await site.start_worker(worker)
        await site.run(counting(40, 2, "r1"))
        admissions = [each for _, entry in await entries_of(store) for each in entry.admissions]
    assert [said(each.request) for each in admissions] == [{**ALL, "seed": admissions[0].request.sampling.seed}]
