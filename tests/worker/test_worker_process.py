"""The worker as a process: real model, real wire, and how it starts and ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc import CLUSTER_MESSAGE_BYTES
from common.step import Step, StepStatus
from common.step_codec import result_from_pb, step_to_pb
from common.step_wire import open_response, open_step_stream
from quire.rpc import channel_options
from quire.v1 import worker_pb2 as pb
from quire.v1 import worker_pb2_grpc
from quire.v1.inference_pb2 import SamplingParams
from tests.equality import assert_equal_greedy
from tests.patience import patient
from tests.services import ROOT, Service, free_address
from tests.worker.forked_worker import run_worker
from tests.worker.step_client import StepClient
from tests.worker.steps import seat_state
from tests.worker.test_registration import Scheduler, answered
from tests.worker.tiny_models import MAX_POSITIONS, VOCAB_SIZE, random_prompts, reference_greedy, write_tiny_model

NUM_TOKENS = 16
SIMULATED = "benchmarks.services.simulated_worker"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_tiny_model("qwen3", tmp_path_factory.mktemp("tiny-qwen3"))
    generation = made / "generation_config.json"
    generation.write_text(json.dumps({**json.loads(generation.read_text()), "temperature": 0.5, "top_k": 20}))
    return made


@pytest.fixture(scope="module")
def worker(folder: Path) -> Iterator[Service]:
    sizes = ("--num-blocks", "80", "--block-size", "4", "--num-host-blocks", "6", "--max-num-seqs", "4")
    with Service("worker_svc", "--model", str(folder), "--worker-id", "w7", "--threads", "1", *sizes) as service:
        service.wait_for("ready")
        yield service


@pytest.fixture
async def channel(worker: Service) -> AsyncIterator[grpc.aio.Channel]:
    async with connect(worker) as channel:
        yield channel


def connect(service: Service) -> grpc.aio.Channel:
    address = service.wait_for("listening")["address"]
    return grpc.aio.insecure_channel(address, options=channel_options(CLUSTER_MESSAGE_BYTES))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A process that is expected to end by itself."""
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)


def sentences(completed: subprocess.CompletedProcess[str]) -> list[str]:
    """Lines on standard error beside the log."""
    return [line for line in completed.stderr.splitlines() if not line.startswith("{")]


async def test_the_process_describes_the_model_that_it_loaded(channel: grpc.aio.Channel) -> None:
    answer = await worker_pb2_grpc.WorkerStub(channel).Describe(pb.DescribeRequest())
    assert answer.worker_id == "w7"
    assert Path(answer.model.name).name.startswith("tiny-qwen3")  # as --model was given
    assert answer.model.architecture == "Qwen3ForCausalLM"
    assert (answer.model.dtype, answer.device) == ("float32", "cpu")
    assert (answer.model.vocab_size, answer.model.max_model_len) == (VOCAB_SIZE, MAX_POSITIONS)
    assert list(answer.model.eos_token_ids) == [2]
    assert answer.model.sampling_defaults == SamplingParams(temperature=0.5, top_k=20)
    assert not answer.HasField("tokenizer")
    assert (answer.pool.num_blocks, answer.pool.block_size, answer.num_seats) == (80, 4, 4)
    assert (answer.pool.num_host_blocks, answer.pool.dtype) == (6, "float32")
    # keys and values, 3 layers, 4 tokens, 2 heads of 32 numbers of 4 bytes
    assert answer.pool.bytes_per_block == 2 * 3 * 4 * 2 * 32 * 4
    assert [each.phase for each in answer.startup] == [
        "checkpoint",
        "kernels",
        "weights",
        "kv_pool",
        "warm_up",
        "huge_pages",
    ]


def test_the_log_says_how_large_both_pools_are(worker: Service) -> None:
    ready = worker.wait_for("ready")
    assert (ready["num_blocks"], ready["num_host_blocks"], ready["block_size"]) == (80, 6, 4)
    assert ready["bytes_per_block"] == 2 * 3 * 4 * 2 * 32 * 4


async def test_candidates_and_swap_times_come_over_the_wire(channel: grpc.aio.Channel) -> None:
    stub = worker_pb2_grpc.WorkerStub(channel)
    (prompt,) = random_prompts([6])
    start = Step(epoch=5, step_id=1, snapshot=True, whole=[seat_state(0, prompt, [7, 9])], rows=[0], num_tokens=[6])
    ranked = result_from_pb(await stub.Step(step_to_pb(replace(start, samples=[], candidates=[0, 5]))))
    sampled = result_from_pb(await stub.Step(step_to_pb(replace(start, step_id=2))))
    (found,) = ranked.candidates
    assert (len(found.token_ids), len(ranked.token_ids), ranked.swap_ns) == (5, 0, 0)
    assert list(found.logprobs) == sorted(found.logprobs, reverse=True)
    assert found.token_ids[0] == sampled.token_ids[0]
    swap = Step(epoch=5, step_id=3, swap_out=[7, 5, 9, 0])
    swapped = result_from_pb(await stub.Step(step_to_pb(swap)))
    assert 0 < swapped.swap_ns <= swapped.exec_ns


async def test_prompts_decoded_over_the_stream_give_the_models_own_tokens(
    channel: grpc.aio.Channel, folder: Path
) -> None:
    await check_decoding(channel, folder)


@pytest.mark.long
async def test_the_accelerators_runner_gives_the_same_tokens_on_a_cpu(folder: Path) -> None:
    sizes = ("--num-blocks", "80", "--block-size", "4", "--max-num-seqs", "4")
    with Service("worker_svc", "--model", str(folder), "--runner", "device", "--threads", "1", *sizes) as service:
        assert service.wait_for("ready")["kv_dtype"] == "float32"
        async with connect(service) as channel:
            answer = await worker_pb2_grpc.WorkerStub(channel).Describe(pb.DescribeRequest())
            phases = [each.phase for each in answer.startup]
            assert phases == ["checkpoint", "weights", "kv_pool", "warm_up", "huge_pages"]
            await check_decoding(channel, folder)
        assert service.stop() == 0


async def test_a_pool_of_int8_says_so_and_has_as_many_blocks_as_fit_with_their_scales(folder: Path) -> None:
    sizes = ("--kv-memory-bytes", "400000", "--block-size", "4", "--max-num-seqs", "4")
    with Service("worker_svc", "--model", str(folder), "--kv-dtype", "int8", "--threads", "1", *sizes) as service:
        async with connect(service) as channel:
            service.wait_for("ready")
            answer = await worker_pb2_grpc.WorkerStub(channel).Describe(pb.DescribeRequest())
        assert service.stop() == 0
    num_bytes = 3 * 2 * 4 * 2 * (32 + 4)  # layers, K and V, tokens, heads, bytes of a head and a scale
    assert (answer.pool.dtype, answer.pool.bytes_per_block) == ("int8", num_bytes)
    assert answer.pool.num_blocks == 400_000 // num_bytes
    assert answer.model.dtype == "float32"


async def check_decoding(channel: grpc.aio.Channel, folder: Path) -> None:
    prompts = random_prompts([5, 30])
    client = StepClient(num_blocks=80, block_size=4, epoch=10)
    for prompt in prompts:
        client.add(prompt)
    stream = open_step_stream(channel)
    while not client.is_done(NUM_TOKENS):
        step = client.next_step(chunk=8)
        await stream.write(step_to_pb(step))
        message = await stream.read()
        assert isinstance(message, bytes)
        client.take(step, result_from_pb(open_response(message)))
    stream.cancel()
    reference = reference_greedy(folder, prompts, NUM_TOKENS)
    assert_equal_greedy(reference.tokens, reference.margins, client.outputs(NUM_TOKENS))


async def test_a_step_that_the_model_cannot_take_is_invalid_and_the_next_is_executed(
    channel: grpc.aio.Channel,
) -> None:
    stub = worker_pb2_grpc.WorkerStub(channel)
    state = seat_state(0, [VOCAB_SIZE], [0])
    step = Step(epoch=20, step_id=1, snapshot=True, whole=[state], rows=[0])
    refused = result_from_pb(await stub.Step(step_to_pb(step)))
    assert refused.status is StepStatus.INVALID
    assert refused.error == f"whole[0].token_ids names token id {VOCAB_SIZE}: there are {VOCAB_SIZE}, counted from 0"
    taken = result_from_pb(await stub.Step(step_to_pb(replace(step, whole=[seat_state(0, [5], [0])]))))
    assert taken.status is StepStatus.OK
    assert 0 < taken.exec_ns <= taken.total_ns


@pytest.mark.parametrize("service", ["", "quire.v1.Worker", "quire.v1.Worker.Registered"])
async def test_a_loaded_worker_is_healthy(channel: grpc.aio.Channel, service: str) -> None:
    health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    assert health.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_loaded_worker_that_a_leader_refuses_is_not_ready() -> None:
    """A rollout that waits for readiness replaces no worker by it."""
    scheduler = Scheduler()
    scheduler.refusals = 10**6
    await scheduler.start(address := free_address())
    with Service(SIMULATED, "--scheduler", address) as service:
        async with connect(service) as channel:
            await answered(scheduler)
            health = health_pb2_grpc.HealthStub(channel)
            loaded = await health.Check(health_pb2.HealthCheckRequest(service="quire.v1.Worker"))
            assert loaded.status == health_pb2.HealthCheckResponse.SERVING
            watch = health.Watch(health_pb2.HealthCheckRequest(service="quire.v1.Worker.Registered"))
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            scheduler.refusals = 0
            async with asyncio.timeout(patient(60)):
                while not scheduler.requests.empty():  # of refusals
                    scheduler.requests.get_nowait()
                await answered(scheduler)
                registered = await scheduler.requests.get()
                present = await health.Check(health_pb2.HealthCheckRequest(service="quire.v1.Worker.Registered"))
                assert present.status == health_pb2.HealthCheckResponse.NOT_SERVING  # the leader has not looked at it
                stream = open_step_stream(channel, registered.step_key)
                assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
            stream.cancel()
            watch.cancel()
        await asyncio.to_thread(service.stop)
    await scheduler.server.stop(0)


def test_a_folder_that_does_not_exist_is_one_sentence_and_exit_code_2() -> None:
    completed = run("worker_svc", "--model", "./no/such/folder")
    assert completed.returncode == 2
    assert sentences(completed) == [
        "worker: there is no folder ./no/such/folder: check the path, or give the id of a model on the hub"
    ]


def test_a_pool_that_cannot_hold_one_sequence_is_one_sentence_and_exit_code_2(folder: Path) -> None:
    completed = run_worker("--model", str(folder), "--num-blocks", "2", "--max-model-len", "100")
    assert completed.returncode == 2
    assert sentences(completed) == [
        "worker: --num-blocks 2 of 16 tokens each holds 32 tokens, less than one sequence of --max-model-len 100: "
        "give --num-blocks 7 or more, or --max-model-len 32 or less"
    ]


def test_a_host_pool_that_the_memory_does_not_hold_is_one_sentence_and_exit_code_2(folder: Path) -> None:
    completed = run_worker("--model", str(folder), "--num-host-blocks", "4000000", "--block-size", "256")
    assert completed.returncode == 2
    (sentence,) = sentences(completed)
    assert sentence.startswith("worker: --num-host-blocks 4000000 of ")
    assert "of the main memory are free: give at most --num-host-blocks " in sentence


def test_a_setting_that_cannot_be_is_one_sentence_and_exit_code_2() -> None:
    completed = run_worker("--model", "m", "--block-size", "0")
    assert completed.returncode == 2
    assert sentences(completed) == [
        "worker: --block-size: Input should be greater than or equal to 1, not '0' (see --help)"
    ]


def test_fp8_without_a_runner_that_has_it_is_one_sentence_and_exit_code_2() -> None:
    completed = run_worker("--model", "m", "--device", "cpu", "--kv-dtype", "fp8")
    assert completed.returncode == 2
    assert sentences(completed) == [
        "worker: --kv-dtype fp8 needs the runner of an accelerator: leave it out, or give --runner device"
    ]


def test_int8_keys_and_values_without_native_kernels_are_one_sentence_and_exit_code_2(folder: Path) -> None:
    completed = run_worker("--model", str(folder), "--device", "cpu", "--kernels", "torch", "--kv-dtype", "int8")
    assert completed.returncode == 2
    assert sentences(completed) == [
        "worker: --kv-dtype int8 needs native kernels, and --kernels torch was given: leave one of them out"
    ]


def test_print_config_prints_the_settled_settings_and_ends() -> None:
    completed = run_worker("--model", "m", "--num-blocks", "9", "--print-config")
    assert completed.returncode == 0
    assert {'model = "m"', "num_blocks = 9", "block_size = 16"} <= set(completed.stdout.splitlines())


def test_a_worker_told_to_end_while_it_loads_ends_well(folder: Path) -> None:
    with Service("worker_svc", "--model", str(folder)) as service:
        service.wait_for("listening")
        assert service.stop() == 0


async def test_a_worker_told_to_end_answers_its_step_and_ends_well() -> None:
    with Service(SIMULATED, "--step-ms", "300") as service:
        service.wait_for("ready")
        async with connect(service) as channel:
            stream = open_step_stream(channel)
            state = seat_state(0, [5], [0])
            await stream.write(step_to_pb(Step(epoch=1, step_id=1, snapshot=True, whole=[state], rows=[0])))
            await stream.write(step_to_pb(Step(epoch=1, step_id=2, rows=[0])))
            await stream.read()  # step 2 was taken while step 1 took its time
            service.signal(signal.SIGTERM)
            message = await stream.read()
            assert isinstance(message, bytes)
            answer = result_from_pb(open_response(message))
            assert (answer.step_id, answer.status) == (2, StepStatus.OK)
        assert service.wait() == 0


def test_a_port_in_use_is_one_sentence_and_exit_code_2() -> None:
    with Service(SIMULATED) as service:
        address = service.wait_for("listening")["address"]
        completed = run(SIMULATED, "--listen", address)
    assert completed.returncode == 2
    sentence = sentences(completed)[-1]  # gRPC's own library may have logged before
    assert sentence.startswith(f"simulated_worker: cannot listen on {address}: ")
    assert sentence.endswith("choose another with --listen host:port")


def test_a_worker_ends_when_its_supervisor_is_gone() -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-m", SIMULATED, "--parent-pipe-fd", str(reading)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, pass_fds=[reading]) as process:
        os.close(reading)
        assert process.stderr is not None
        assert any('"ready"' in line for line in process.stderr)
        os.close(writing)
        assert process.wait(30) == 0


@pytest.mark.long
async def test_a_simulated_worker_takes_its_time_and_repeats_its_tokens() -> None:
    with Service(SIMULATED, "--step-ms", "5", "--per-seq-us", "1000", "--model-len", "64") as service:
        service.wait_for("ready")
        async with connect(service) as channel:
            stub = worker_pb2_grpc.WorkerStub(channel)
            description = await stub.Describe(pb.DescribeRequest())
            assert (description.model.vocab_size, description.model.max_model_len) == (32_000, 64)
            assert not description.HasField("tokenizer")
            whole = [seat_state(seat, [5, 6], [seat]) for seat in range(3)]
            start = Step(epoch=1, step_id=1, snapshot=True, whole=whole, rows=[0, 1, 2], num_tokens=[2, 2, 2])
            first = result_from_pb(await stub.Step(step_to_pb(start)))
            second = result_from_pb(await stub.Step(step_to_pb(Step(epoch=1, step_id=2, rows=[0, 1, 2]))))
            again = result_from_pb(await stub.Step(step_to_pb(replace(start, step_id=3))))
    assert first.exec_ns >= 8_000_000  # 5 ms, and 1 ms for each of 3 sequences
    assert list(first.token_ids) == list(again.token_ids) != list(second.token_ids)
    assert len(set(first.token_ids)) == 3
