"""A worker that only pretends to compute: real process, real gRPC, a cost model instead of a model.

    python -m benchmarks.services.simulated_worker --scheduler 127.0.0.1:7847 --step-ms 8

It checks steps and keeps seats like any worker, sleeps as long as the cost model says, and answers tokens that depend
on seat and position only; with --contexts on what the seat's blocks hold, and blocks travel. For measuring everything
but the device: with --trace it notes when each step began and ended.
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import common.grpc_environment  # noqa: F401 - as in a real worker
from benchmarks.services.simulated_contexts import SimulatedContexts, bytes_per_block, tokens_of_contexts
from benchmarks.services.stage_spans import SpanLog
from benchmarks.services.step_trace import StepTrace, WorkerMoments
from benchmarks.services.worker_probes import probe_worker
from common.log import set_up_logging
from common.process import end_after, run_service
from common.refusal import refuse_to_start
from common.step import Step, StepResult
from quire.listening import ListenError
from worker_svc.checkpoint.tokenizer_files import TokenizerFiles
from worker_svc.description import ModelDescription, WorkerDescription
from worker_svc.loaded_model import LoadedModel
from worker_svc.service.lifecycle import ServiceOptions, serve
from worker_svc.steps.fetched_blocks import FetchedBlocks
from worker_svc.steps.seat_table import SeatTable
from worker_svc.steps.step_check import BlockPairs, CheckedStep, IntArray, StepRows
from worker_svc.steps.step_limits import StepLimits

_SPIN_NS = 200_000  # the end of a sleep that is too short for the operating system to keep
_SWITCH_INTERVAL_S = 0.0005
_FIRST_TOKEN = 3  # those before it are special
_NOTHING_FETCHED = FetchedBlocks(np.zeros((0, 1), dtype=np.uint8))
_BYTES_PER_BLOCK = 16 * 2 * 32 * 8 * 128 * 2  # of an 8 B model in bfloat16: for display only


class SimulatedRunner:
    """Takes step_ns, and more for each row and each token. An `AnnouncingRunner`, as that of a CPU is."""

    def __init__(
        self,
        limits: StepLimits,
        *,
        step_ns: int,
        per_seq_ns: int,
        per_token_ns: int,
        contexts: SimulatedContexts | None = None,
    ) -> None:
        """`contexts`: what its blocks hold; None: nothing, and tokens do not depend on it."""
        self.before_pass: Callable[[], None] = lambda: None
        self.trace = StepTrace[WorkerMoments]()
        self.contexts = contexts
        self._fetched = _NOTHING_FETCHED if contexts is None else contexts.fetched
        self._seats = SeatTable(limits)
        self._step_ns = step_ns
        self._per_seq_ns = per_seq_ns
        self._per_token_ns = per_token_ns

    def launch(self, step: Step) -> StepResult:
        """Raises InvalidStepError and MissingBlocksError exactly where a real worker does."""
        checked = self._seats.check(step)
        placed = self._fetched.take(step.epoch, checked.placed)
        self._seats.take_over(step, checked)
        rows = checked.rows
        began_ns = time.perf_counter_ns()
        self.before_pass()
        token_ids = self._tokens(checked, placed)
        self._seats.advance(rows, token_ids)
        num_rows, num_tokens = len(rows.seats), int(rows.num_tokens.sum())
        if num_rows:
            cost_ns = num_rows * self._per_seq_ns + num_tokens * self._per_token_ns
            _sleep_until(began_ns + self._step_ns + cost_ns)
        ended_ns = time.perf_counter_ns()
        self.trace.add(WorkerMoments(step.step_id, num_rows, num_tokens, len(token_ids), began_ns, ended_ns))
        return StepResult(epoch=step.epoch, step_id=step.step_id, token_ids=token_ids.tolist())

    def _tokens(self, checked: CheckedStep, placed: BlockPairs) -> IntArray:
        rows, vocab_size = checked.rows, self._seats.limits.vocab_size
        if self.contexts is None:
            return simulated_tokens(rows, vocab_size)
        self.contexts.move(checked, placed)
        last = self.contexts.compute(self._seats, rows)
        return tokens_of_contexts(last, self._seats, rows, _FIRST_TOKEN, vocab_size)


def simulated_tokens(rows: StepRows, vocab_size: int) -> IntArray:
    """Make one token for each sample, a hash of seat and position; never a special token."""
    mixed = rows.sample_seats * 2_654_435_761 + rows.sample_positions * 40_503
    return np.asarray(_FIRST_TOKEN + (mixed ^ (mixed >> 13)) % (vocab_size - _FIRST_TOKEN))


def _sleep_until(end_ns: int) -> None:
    """Sleeps, and gives way for the last moments, so that the end is met within a few microseconds."""
    left_ns = end_ns - time.perf_counter_ns()
    if left_ns > _SPIN_NS:
        time.sleep((left_ns - _SPIN_NS) / 1e9)
    while time.perf_counter_ns() < end_ns:
        time.sleep(0)


def make_limits(arguments: argparse.Namespace) -> StepLimits:
    """Limits that a real worker derives from its model and its memory."""
    return StepLimits(
        num_seats=arguments.max_num_seqs,
        num_blocks=arguments.num_blocks,
        num_host_blocks=arguments.num_host_blocks,
        block_size=arguments.block_size,
        vocab_size=arguments.vocab_size,
        max_model_len=arguments.model_len,
        max_batched_tokens=arguments.max_batched_tokens,
    )


def make_runner(arguments: argparse.Namespace) -> SimulatedRunner:
    """The runner with the cost model of the flags."""
    limits = make_limits(arguments)
    contexts = SimulatedContexts(limits, arguments.max_fetched_blocks) if arguments.contexts else None
    return SimulatedRunner(
        limits,
        step_ns=int(arguments.step_ms * 1e6),
        per_seq_ns=int(arguments.per_seq_us * 1e3),
        per_token_ns=int(arguments.per_token_us * 1e3),
        contexts=contexts,
    )


def make_engine(arguments: argparse.Namespace, runner: SimulatedRunner) -> LoadedModel:
    """The runner and its description, as if it had been loaded."""
    name = f"simulated-{arguments.model_len}-{arguments.vocab_size}"
    contexts, block_bytes = runner.contexts, _BYTES_PER_BLOCK
    if contexts is not None:
        name, block_bytes = f"{name}-contexts", bytes_per_block(arguments.block_size)
    model = ModelDescription(
        name=name,
        fingerprint=hashlib.sha256(name.encode()).hexdigest(),
        architecture="Simulated",
        dtype="bfloat16",
        eos_token_ids=(2,),
    )
    description = WorkerDescription(
        model=model,
        tokenizer=None if arguments.tokenizer is None else _tokenizer(arguments.tokenizer),
        limits=make_limits(arguments),
        bytes_per_block=block_bytes,
        kv_dtype="bfloat16",
        weight_dtype="bfloat16",
        device="simulated",
        startup=(),
    )
    travel = None if contexts is None else contexts.travel(f"{name} {arguments.block_size}")
    return LoadedModel(runner, description, travel=travel)


def _tokenizer(folder: Path) -> TokenizerFiles:
    template = folder / "chat_template.jinja"
    return TokenizerFiles(
        tokenizer_json=(folder / "tokenizer.json").read_bytes(),
        chat_template=template.read_text() if template.is_file() else None,
        special_tokens={},
    )


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    """Flags named like those of `python -m worker_svc` where they mean the same."""
    parser = argparse.ArgumentParser(prog="simulated_worker", description=__doc__)
    parser.add_argument("--scheduler", help="host:port to register with")
    parser.add_argument("--listen", default="127.0.0.1:0", help="host:port to serve on")
    parser.add_argument("--advertise", help="host or host:port at which the scheduler reaches this worker")
    parser.add_argument("--worker-id")
    parser.add_argument("--parent-pipe-fd", type=int)
    parser.add_argument("--step-ms", type=float, default=8.0, help="time of a step")
    parser.add_argument("--per-seq-us", type=float, default=0.0, help="and of each sequence in it")
    parser.add_argument("--per-token-us", type=float, default=0.0, help="and of each token")
    parser.add_argument("--model-len", type=int, default=8192, help="longest sequence")
    parser.add_argument("--vocab-size", type=int, default=32_000)
    parser.add_argument("--num-blocks", type=int, default=32_768)
    parser.add_argument("--num-host-blocks", type=int, default=0)
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--max-batched-tokens", type=int, default=8192)
    parser.add_argument("--contexts", action="store_true", help="keep contexts in blocks, and make tokens of them")
    parser.add_argument("--max-fetched-blocks", type=int, default=4096, help="with --contexts: kept until placed")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json and chat_template.jinja, for text")
    parser.add_argument("--trace", type=Path, help="file for the moments of each step, written at the end")
    parser.add_argument("--spans", type=Path, help="file for the spans of what is around the execution, the same")
    parser.add_argument("--log-level", default="info", choices=("debug", "info", "warning", "error"))
    return parser.parse_args(arguments)


def main() -> None:
    """Entry point of `python -m benchmarks.services.simulated_worker`."""
    arguments = parse_arguments(sys.argv[1:])
    set_up_logging("simulated_worker", arguments.log_level)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    spans = SpanLog()
    if arguments.spans is not None:
        probe_worker(spans)
    options = ServiceOptions(
        listen=arguments.listen,
        advertise=arguments.advertise,
        scheduler=arguments.scheduler,
        worker_id=arguments.worker_id,
        parent_pipe_fd=arguments.parent_pipe_fd,
        drain_timeout_s=0.0,
    )
    runner = make_runner(arguments)
    try:
        run_service(serve(options, lambda: make_engine(arguments, runner)))
    except ListenError as error:
        refuse_to_start("simulated_worker", str(error))
    if arguments.trace is not None:
        runner.trace.write(arguments.trace)
    if arguments.spans is not None:
        spans.write(arguments.spans)


if __name__ == "__main__":
    end_after(main)
