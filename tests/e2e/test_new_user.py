"""Mistakes of a new user: one clear answer each, and everything else keeps running."""

import asyncio
import math
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

import quire
import quire.params
from tests.patience import patient
from tests.services import DEMO_MODEL, ROOT, free_address, start_scheduler, start_worker

GREEDY: quire.params.GenerateParams = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True}
NUM_BLOCKS = 20  # 320 tokens: fewer than the model's context


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ExitStack() as stack:
        scheduler, address = start_scheduler()
        stack.enter_context(scheduler)
        options = ("--num-blocks", str(NUM_BLOCKS), "--threads", "1")
        stack.enter_context(start_worker(address, *options))
        scheduler.wait_for("worker ready")
        yield address
        assert scheduler.process.poll() is None


@pytest.fixture
def client(address: str) -> Iterator[quire.Client]:
    with quire.Client(address) as client:
        before = client.generate("Once upon a time", **GREEDY)
        yield client
        assert client.generate("Once upon a time", **GREEDY).token_ids == before.token_ids
        assert all(worker.blocks.used == 0 for worker in client.stats().workers)


def violated_fields(client: quire.Client, prompt: str | list[int], **params: object) -> list[str]:
    with pytest.raises(quire.InvalidRequestError) as refusal:
        client.generate(prompt, **params)  # type: ignore[arg-type]
    assert len(refusal.value.message) < 2000
    return [violation.field for violation in refusal.value.violations]


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": math.inf}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["x"] * 100_000}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids[0]"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids[0]"),
        ({"logprobs": 1000}, "logprobs"),
        ({"tenant": "x" * 1000}, "tenant"),
        ({"request_id": "a space"}, "request_id"),
    ],
    ids=str,
)
def test_a_bad_parameter_is_named_by_its_keyword(client: quire.Client, params: dict[str, object], field: str) -> None:
    assert field in violated_fields(client, "Hello", **params)


def test_token_ids_out_of_range_are_named(client: quire.Client) -> None:
    assert violated_fields(client, [1, 2, 10**7]) == ["prompt[2]"]


def test_an_empty_prompt_is_refused(client: quire.Client) -> None:
    assert violated_fields(client, [])


def test_a_prompt_longer_than_the_model_is_refused_with_the_numbers(client: quire.Client) -> None:
    with pytest.raises(quire.InvalidRequestError, match="2,048"):
        client.generate([5] * 5000, max_tokens=1)


def test_a_prompt_larger_than_the_pool_is_refused_with_the_numbers(client: quire.Client) -> None:
    with pytest.raises(quire.InvalidRequestError, match="KV"):
        client.generate([5] * 1000, max_tokens=1)


def test_a_bound_that_cannot_fit_is_refused_and_no_bound_is_fitted(client: quire.Client) -> None:
    with pytest.raises(quire.InvalidRequestError, match="max_tokens"):
        client.generate([5] * 20, max_tokens=400)
    completion = client.generate([5] * 20, ignore_eos=True, temperature=0)
    assert 20 + len(completion.token_ids) <= NUM_BLOCKS * 16
    assert completion.finish_reason is quire.FinishReason.LENGTH


def test_text_that_is_not_unicode_never_leaves_the_client_or_is_refused(client: quire.Client) -> None:
    with pytest.raises((quire.InvalidRequestError, UnicodeEncodeError, ValueError)):
        client.generate("lone surrogate \ud800", max_tokens=2)


@pytest.mark.parametrize(
    "message",
    [
        b"\xff\xff\xff\xff",
        b"\x12\x02\xc3\x28",  # field 2 (text) of two bytes that are not UTF-8
    ],
    ids=["no protobuf", "invalid UTF-8"],
)
@pytest.mark.parametrize("method", ["Generate", "Session", "GetRequest"])
def test_undecodable_bytes_are_an_invalid_argument(
    client: quire.Client, address: str, method: str, message: bytes
) -> None:
    path = f"/quire.v1.Inference/{method}"
    with raw_channel(address) as channel, pytest.raises(grpc.RpcError) as refusal:
        if method == "Session":
            list(channel.stream_stream(path)(iter([message])))
        elif method == "Generate":
            list(channel.unary_stream(path)(message))
        else:
            channel.unary_unary(path)(b"\x0a\x02\xc3\x28" if message[0] == 0x12 else message)
    assert code_of(refusal) is grpc.StatusCode.INVALID_ARGUMENT


def raw_channel(address: str) -> Any:
    """A channel that takes bytes for messages."""
    return grpc.insecure_channel(address)


def code_of(refusal: "pytest.ExceptionInfo[Any]") -> grpc.StatusCode:
    code = refusal.value.code()
    assert isinstance(code, grpc.StatusCode)
    return code


def test_an_unknown_method_is_unimplemented(client: quire.Client, address: str) -> None:
    with raw_channel(address) as channel, pytest.raises(grpc.RpcError) as refusal:
        channel.unary_unary("/quire.v1.Inference/Nonsense")(b"")
    assert code_of(refusal) is grpc.StatusCode.UNIMPLEMENTED


def test_a_message_above_the_limit_is_refused(client: quire.Client, address: str) -> None:
    with raw_channel(address) as channel, pytest.raises(grpc.RpcError) as refusal:
        channel.unary_unary("/quire.v1.Inference/Tokenize")(b"\x0a\x80\x80\x80\x10" + b"x" * (32 << 20))
    assert code_of(refusal) is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_same_request_id_is_the_same_request(client: quire.Client) -> None:
    params: quire.params.GenerateParams = {"request_id": "mine", "seed": 1, "temperature": 1.0, "max_tokens": 20}
    first = client.generate("Hello", **params)
    again = client.generate("Hello", **params)
    assert (again.text, again.token_ids, again.seed) == (first.text, first.token_ids, first.seed)
    with pytest.raises(quire.AlreadyExistsError):
        client.generate("Something else", **params)
    record = client.get("mine")
    assert record.state is quire.RequestState.FINISHED


def test_many_submissions_of_one_id_are_one_run(client: quire.Client, address: str) -> None:
    async def all_at_once() -> tuple[set[tuple[int, ...]], int]:
        async with quire.AsyncClient(address) as many:
            before = (await many.stats()).num_admitted
            runs = [many.generate("Hello", request_id="crowd", temperature=1.0, max_tokens=30) for _ in range(50)]
            outputs = {tuple(each.token_ids) for each in await asyncio.gather(*runs)}
            return outputs, (await many.stats()).num_admitted - before

    outputs, num_admitted = asyncio.run(all_at_once())
    assert len(outputs) == 1
    assert num_admitted == 1


def test_a_deadline_ends_the_request_and_frees_its_blocks(client: quire.Client) -> None:
    with pytest.raises(quire.RequestExpiredError):
        client.generate("Hello", timeout_s=0.05, max_tokens=250, ignore_eos=True, request_id="late")
    assert client.get("late").state is quire.RequestState.EXPIRED


def run_to_refusal(*command: str) -> str:
    """The one line that the process leaves on standard error. Its exit code is that of a configuration error."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=patient(90)
    )
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.long
def test_a_port_in_use_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert address in run_to_refusal("scheduler_svc", "--listen", address)
        assert address in run_to_refusal("worker_svc", "--model", str(DEMO_MODEL), "--listen", address)


def test_an_unreachable_store_is_one_sentence() -> None:
    address = free_address()
    line = run_to_refusal("scheduler_svc", "--store", f"redis://{address}", "--store-timeout-s", "0.5")
    assert address in line


def test_a_model_folder_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    assert "missing" in run_to_refusal("worker_svc", "--model", str(tmp_path / "missing"))


def test_a_pickled_checkpoint_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((DEMO_MODEL / "config.json").read_text())
    torch.save({}, tmp_path / "pytorch_model.bin")
    assert "safetensors" in run_to_refusal("worker_svc", "--model", str(tmp_path))


def test_a_bad_flag_is_one_sentence() -> None:
    assert "pipeline" in run_to_refusal("scheduler_svc", "--pipeline-depth", "9").replace("_", "-")
