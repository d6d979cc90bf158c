"""Constraints of requests: what is refused before anything is compiled, and the grammars that workers get."""

import json
import re
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from common.bounds import MOST_CONSTRAINT_BYTES
from quire.errors import FailedPreconditionError
from quire.v1 import inference_pb2 as pb
from scheduler_svc.requests.params.prompt_checks import ModelLimits
from scheduler_svc.requests.params.structured_output import grammar_of
from tests.scheduler.request_settling import LIMITS, refused, request_of, settled
from tests.services import DEMO_MODEL

Output = pb.StructuredOutput
FLEXIBLE = pb.JSON_WHITESPACE_FLEXIBLE
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "integer"}}},
        "required": ["name", "tags"],
        "additionalProperties": False,
    }
)


@cache
def tokenizer() -> LLTokenizer:
    return LLTokenizer((DEMO_MODEL / "tokenizer.json").read_text())


def accepts(output: pb.StructuredOutput, text: str) -> bool:
    matcher = LLMatcher(tokenizer(), grammar_of(output), log_level=0)
    token_ids = tokenizer().tokenize_str(text)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


@settings(max_examples=60)
@given(texts=st.lists(st.text(min_size=1, max_size=12), min_size=1, max_size=5), other=st.text(max_size=12))
def test_a_choice_accepts_each_of_its_texts_and_no_other(texts: list[str], other: str) -> None:
    texts = [text.encode("utf-8", "replace").decode() for text in texts]
    output = Output(choice=pb.Choice(texts=texts))
    assert all(accepts(output, text) for text in texts)
    other = other.encode("utf-8", "replace").decode()
    assert accepts(output, other) == (other in texts)


@pytest.mark.parametrize("pattern", ["[a-c]{2,3}", "a/b", r"\d+(\.\d+)?", "(yes|no)!?", "[^/]*x"])
@pytest.mark.parametrize("text", ["ab", "abcd", "a/b", "12", "3.5", "yes!", "no", "zzx", ""])
def test_an_expression_accepts_what_it_matches_whole(pattern: str, text: str) -> None:
    assert accepts(Output(regex=pattern), text) == (re.fullmatch(pattern, text) is not None)


def test_json_has_no_space_between_tokens_unless_it_is_flexible() -> None:
    compact, spaced = '{"name":"a b","tags":[1,2]}', '{ "name" : "a b",\n\t"tags": [1, 2]\n}'
    endless = '{"name":"a b","tags":[1,\n\n2]}'
    assert [accepts(Output(json_schema=PERSON), each) for each in (compact, spaced, endless)] == [True, False, False]
    flexible = Output(json_schema=PERSON, json_whitespace=FLEXIBLE)
    assert [accepts(flexible, each) for each in (compact, spaced, endless)] == [True, True, False]


def test_any_object_is_a_json_object() -> None:
    texts = ('{"a":[1,{"b":null}]}', "{}", "[1]", "1")
    assert [accepts(Output(json_object=True), each) for each in texts] == [True, True, False, False]


def test_a_settled_request_has_the_grammar_for_each_sample_and_beam() -> None:
    output = Output(lark='start: "a"')
    for request in (
        request_of(structured_output=output, sampling=pb.SamplingParams(n=3)),
        request_of(structured_output=output, beam=pb.BeamParams(beam_width=2)),
    ):
        assert json.loads(settled(request).sequence_sampling(5, 1).grammar) == {
            "grammars": [{"lark_grammar": 'start: "a"'}]
        }


@pytest.mark.parametrize(
    ("output", "field", "words"),
    [
        (Output(), "structured_output", "is empty: give json_schema"),
        (Output(json_object=False), "structured_output", "is empty"),
        (Output(regex=""), "structured_output.regex", "is empty"),
        (Output(choice=pb.Choice()), "structured_output.choice.texts", "at least one"),
        (Output(choice=pb.Choice(texts=["a", ""])), "structured_output.choice.texts[1]", "is empty"),
        (Output(choice=pb.Choice(texts=["x" * 40_000] * 2)), "structured_output.choice.texts", "80,000 bytes"),
        (Output(json_schema="{"), "structured_output.json_schema", "cannot be read"),
        (Output(json_schema="[1]"), "structured_output.json_schema", "cannot be read"),
        (Output(json_schema='{"a":' * 200), "structured_output.json_schema", "cannot be read"),
        (Output(regex="a", json_whitespace=7), "structured_output.json_whitespace", "is 7"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_constraint_is_refused_by_its_field(output: pb.StructuredOutput, field: str, words: str) -> None:
    violations = refused(request_of(structured_output=output))
    assert list(violations) == [field]
    assert words in violations[field]


def test_texts_to_choose_from_may_have_as_many_bytes_together_as_any_constraint() -> None:
    assert settled(
        request_of(structured_output=Output(choice=pb.Choice(texts=["é" * (MOST_CONSTRAINT_BYTES // 4)] * 2)))
    )


@pytest.mark.parametrize(
    ("more", "forces"),
    [
        ({}, True),
        ({"sampling": pb.SamplingParams(n=3)}, True),
        ({"sampling": pb.SamplingParams(best_of=1)}, True),
        ({"sampling": pb.SamplingParams(n=3, best_of=3)}, True),
        ({"sampling": pb.SamplingParams(best_of=2)}, False),
        ({"sampling": pb.SamplingParams(n=3, best_of=4)}, False),
        ({"beam": pb.BeamParams(beam_width=2)}, False),
        ({"stopping": pb.StoppingParams(stop=["a"])}, False),
        ({"output": pb.OutputParams(logprobs=0)}, False),
        ({"output": pb.OutputParams(prompt_logprobs=0)}, True),
    ],
)
def test_text_is_forced_where_no_token_must_come_by_itself(more: dict[str, object], forces: bool) -> None:
    """A stop string may end the output within what is forced, and log-probabilities are those of sampled tokens."""
    assert settled(request_of(structured_output=Output(regex="aaaa"), **more)).sampling.forces_text is forces
    assert not settled(request_of(**more)).sampling.forces_text


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"stopping": pb.StoppingParams(ignore_eos=True)}, "stopping.ignore_eos"),
        ({"stopping": pb.StoppingParams(min_tokens=2)}, "stopping.min_tokens"),
        ({"sampling": pb.SamplingParams(allowed_token_ids=[5])}, "sampling.allowed_token_ids"),
    ],
)
def test_what_contradicts_a_constraint_is_refused(more: dict[str, object], field: str) -> None:
    violations = refused(request_of(structured_output=Output(regex="a"), **more))
    assert list(violations) == [field]
    assert settled(request_of(**more))


def test_a_model_without_text_or_end_has_no_constraints() -> None:
    def limits(**values: object) -> ModelLimits:
        given = {name: getattr(LIMITS, name) for name in LIMITS.__slots__}
        return ModelLimits(**{**given, **values})

    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), structured_output=Output(regex="a"))
    with pytest.raises(FailedPreconditionError, match="no tokenizer"):
        settled(request, limits(has_tokenizer=False, has_chat_template=False))
    with pytest.raises(FailedPreconditionError, match="no end-of-sequence token"):
        settled(request, limits(eos_token_ids=frozenset()))
