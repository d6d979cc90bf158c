"""Grammars are checked by the tokenizer of the model that is served now, and refused by the name of their field."""

import json
from types import SimpleNamespace
from typing import cast

import grpc
import pytest

from quire.errors import InvalidRequestError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.params.grammar_check import GrammarCheck
from scheduler_svc.requests.params.prompt_checks import ModelLimits
from scheduler_svc.requests.params.served_model import ServedModel
from scheduler_svc.text.tokenizer import ModelTokenizer
from tests.scheduler.mortal_sites import speaking_worker
from tests.scheduler.serving_site import counting, running_site
from tests.services import DEMO_MODEL

GOOD = json.dumps({"grammars": [{"json_schema": {"type": "object"}}]})
BAD = json.dumps({"grammars": [{"lark_grammar": "start: nothing"}]})


def served_model(tokenizer_json: bytes) -> ServedModel:
    return ServedModel(
        name="m",
        fingerprint="f",
        architecture="LlamaForCausalLM",
        dtype="float32",
        limits=ModelLimits(
            vocab_size=2048,
            max_model_len=512,
            eos_token_ids=frozenset({0}),
            has_tokenizer=True,
            has_chat_template=False,
        ),
        tokenizer=cast(ModelTokenizer, SimpleNamespace(tokenizer_json=tokenizer_json)),
        tokenizer_fingerprint="t",
    )


async def test_a_grammar_that_cannot_be_compiled_is_refused_by_the_name_of_its_field() -> None:
    check, model = GrammarCheck(), served_model((DEMO_MODEL / "tokenizer.json").read_bytes())
    await check.check("", model)
    await check.check(GOOD, model)
    with pytest.raises(InvalidRequestError, match=r"structured_output.*cannot be used.*unknown name"):
        await check.check(BAD, model)


async def test_a_request_whose_grammar_cannot_be_compiled_is_refused_before_any_worker_hears_of_it() -> None:
    worker = speaking_worker()
    worker.description.model.eos_token_ids[:] = [0]
    async with running_site() as site:
        await site.start_worker(worker)
        constraint = pb.StructuredOutput(lark="start: nothing")
        with pytest.raises(grpc.aio.AioRpcError, match=r"structured_output.*unknown name") as caught:
            await site.run(counting(10, structured_output=constraint))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert not [step for step in worker.steps if step.rows]


async def test_the_trial_is_that_of_the_model_that_is_served_now() -> None:
    content = (DEMO_MODEL / "tokenizer.json").read_bytes()
    check, model = GrammarCheck(), served_model(content)
    first = check._trial_of(model)
    assert check._trial_of(model) is first
    other = check._trial_of(served_model(content))
    assert other is not first and check._trial_of(model) is not other
