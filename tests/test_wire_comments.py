"""Comments of the protos have what a client in another language has to know: ranges, and reasons of errors."""

import math
import re

import pytest

from common.sampling_params import NUMERIC_PARAMS
from quire import errors
from quire.params import ClientOptions
from scheduler_svc.requests.prefixes.prefix_requests import NameInUseError
from tests.wire_comments import ROOT, comments_of_fields

RANGES = {
    **{f"SamplingParams.{each.name}": (each.low, each.high) for each in NUMERIC_PARAMS},
    "SamplingParams.n": (1, 128),
    "SamplingParams.best_of": (math.inf, 128),  # from n on
    "SamplingParams.logit_bias": (-100, 100),
    "BeamParams.beam_width": (2, 64),
    "BeamParams.length_penalty": (-4, 4),
    "GenerateRequest.priority": (-1000, 1000),
    "GenerateRequest.timeout_ms": (1, math.inf),
    "StoppingParams.max_tokens": (1, math.inf),
    "OutputParams.logprobs": (0, 20),
    "Choice.texts": (1, 1024),
    "PinPrefixRequest.name": (1, 128),
}


@pytest.fixture(scope="module")
def comments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return comments_of_fields(tmp_path_factory.mktemp("comments"))


@pytest.mark.parametrize("name", RANGES)
def test_the_comment_of_a_number_states_its_range(name: str, comments: dict[str, str]) -> None:
    text = comments[f"quire.v1.{name}"].replace(",", "")
    numbers = {float(each) for each in re.findall(r"(?<![\w.])-?\d+(?:\.\d+)?", text)}
    assert {each for each in RANGES[name] if abs(each) != math.inf} <= numbers, text


def test_ids_say_which_tokens_there_are(comments: dict[str, str]) -> None:
    for name in (
        "TokenIds.ids",
        "StoppingParams.stop_token_ids",
        "SamplingParams.logit_bias",
        "SamplingParams.allowed_token_ids",
        "DetokenizeRequest.token_ids",
    ):
        assert "[0, vocab_size)" in comments[f"quire.v1.{name}"], name


def test_every_reason_of_an_error_is_listed_and_no_other() -> None:
    head = (ROOT / "protos/quire/v1/inference.proto").read_text().partition("\nsyntax = ")[0]
    listed = re.search(r"has a stable reason:(.*?)REQUEST_FAILED", head, re.DOTALL)
    assert listed is not None
    found = [*vars(errors).values(), NameInUseError]
    known = {each.reason for each in found if isinstance(each, type) and issubclass(each, errors.QuireError)}
    assert set(re.findall(r"[A-Z]+(?:_[A-Z]+)*", listed[1])) | {"REQUEST_FAILED"} == known


def test_the_time_for_which_the_sdk_looks_for_a_leader_is_its_default() -> None:
    text = " ".join((ROOT / "protos/quire/v1/inference.proto").read_text().split())
    seconds = re.search(r"the SDK retries for (\d+) s", text)
    assert seconds is not None and float(seconds[1]) == ClientOptions().reconnect_timeout_s
