"""Time that a new scheduler needs after a death: from its start to the first new token, by live requests.

    python -m benchmarks.durability.recovery_time [--requests 10000] [--prompt 128] [--tokens 100] [--output FILE]

Writes a journal as a dead scheduler would have left it into an embedded Valkey, and starts the real scheduler on it,
with a simulated worker that waits for it already and the demo model's tokenizer, so that the text of every request is
made again. The process's own start, that is Python and its imports, is part of the time, and shown apart.
"""

import argparse
import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop

import quire
from benchmarks.page_section import SCHEDULER, Document, Headline, PageSection, Section, at_most, grid, number
from benchmarks.report import RESULTS, ROOT, write_result
from benchmarks.services.processes import describe_valkey, embedded_valkey, free_port, started
from benchmarks.services.simulated_worker import make_engine, make_runner, parse_arguments
from common.arrays import pack_int32, pack_int64
from quire.v1 import inference_pb2 as pb
from quire.v1 import journal_pb2
from scheduler_svc.journal.journal_writer import JournalWriter
from scheduler_svc.journal.redis_store import RedisStore

TOKENIZER = ROOT / "demo" / "model"
BATCH = 256  # sequences of an entry of deltas
BUDGET_S = 3.0


def admission(number: int, num_prompt_tokens: int, fingerprint: str) -> journal_pb2.Admission:
    request = pb.GenerateRequest(
        request_id=f"r{number}",
        text="a prompt",
        sampling=pb.SamplingParams(seed=number),
        stopping=pb.StoppingParams(max_tokens=1000, ignore_eos=True),
        on_disconnect=pb.ON_DISCONNECT_CONTINUE,
    )
    return journal_pb2.Admission(
        sequence=number,
        request=request,
        prompt_token_ids=pack_int32([100 + (number + i) % 200 for i in range(num_prompt_tokens)]),
        arrived_unix_ns=time.time_ns(),
        model_fingerprint=fingerprint,
    )


def entries(arguments: argparse.Namespace, fingerprint: str) -> Iterator[journal_pb2.JournalEntry]:
    """Yield all admissions, then entries with one token for each sequence of a batch, batch after batch."""
    numbers = range(1, arguments.requests + 1)
    for start in range(0, len(numbers), BATCH):
        each = [admission(number, arguments.prompt, fingerprint) for number in numbers[start : start + BATCH]]
        yield journal_pb2.JournalEntry(admissions=each)
    for start in range(0, len(numbers), BATCH):
        batch = numbers[start : start + BATCH]
        for position in range(arguments.tokens):
            tokens = [700 + (number + position) % 800 for number in batch]
            yield journal_pb2.JournalEntry(delta_sequences=pack_int64(batch), delta_tokens=pack_int32(tokens))


async def write_journal(url: str, arguments: argparse.Namespace, fingerprint: str) -> int:
    """Write the journal; return the number of entries."""
    store = RedisStore(url)
    await store.connect(patience_s=10.0)
    writer = JournalWriter(store, "the dead one", late_s=10.0)
    await writer.take_epoch()
    for entry in entries(arguments, fingerprint):
        await writer.write(entry.SerializeToString())
    await store.close()
    return writer.num_entries


async def first_new_token(address: str, position: int) -> float:
    """Wait for the first new token; return its time."""
    async with quire.AsyncClient(address, connect_timeout_s=60.0) as client:
        stream = client.attach("r1", position)
        await anext(stream)
        at_s = time.monotonic()
        await stream.aclose()
        return at_s


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    address = f"127.0.0.1:{free_port()}"
    worker_flags = ["--scheduler", address, "--tokenizer", str(TOKENIZER), "--step-ms", "8"]
    simulated = parse_arguments(worker_flags)
    fingerprint = make_engine(simulated, make_runner(simulated)).description.model.fingerprint
    with embedded_valkey(arguments.data_dir) as url, started("benchmarks.services.simulated_worker", *worker_flags):
        num_entries = asyncio.run(write_journal(url, arguments, fingerprint))
        time.sleep(2.0)  # the worker is up, and waits for a scheduler
        started_s = time.monotonic()
        with started("scheduler_svc", "--listen", address, "--store", url) as scheduler:
            token_s = asyncio.run(first_new_token(address, arguments.tokens))
            read = scheduler.wait_for("journal read")
            scheduler.wait_for("listening")
            recovered = scheduler.wait_for("requests recovered")
    assert read["num_live"] == recovered["num_requests"] == arguments.requests
    return {
        "entries": num_entries,
        "journal_read_s": read["seconds"],
        "all_rebuilt_s": recovered["seconds"],
        "first_new_token_s": round(token_s - started_s, 3),
    }


def main() -> None:
    """Entry point of `python -m benchmarks.durability.recovery_time`."""
    parser = argparse.ArgumentParser(prog="recovery_time", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=100, help="output tokens of each request in the journal")
    parser.add_argument("--data-dir", type=Path, help="where Valkey keeps its file; default: in memory")
    parser.add_argument("--output", type=Path, default=RESULTS / "recovery_time.json")
    arguments = parser.parse_args()
    uvloop.install()
    figures = {"empty": measure(argparse.Namespace(**{**vars(arguments), "requests": 1})), "full": measure(arguments)}
    for name, each in figures.items():
        print(name, each)
    write_result(
        arguments.output,
        "recovery_time",
        {
            "requests": arguments.requests,
            "prompt_tokens": arguments.prompt,
            "output_tokens": arguments.tokens,
            "store": describe_valkey(arguments.data_dir),
            "budget_s": BUDGET_S,
            **figures,
        },
    )


def section_of(document: Document) -> Section:
    full, budget_s = document["full"], document["budget_s"]
    seconds = full["first_new_token_s"]
    figure = f"{number(seconds, 2, budget_s)} s from the start to the first new token, "
    head = ("live requests", "journal entries", "journal read, s", "all requests rebuilt, s", "first new token, s")
    keys = ("entries", "journal_read_s", "all_rebuilt_s", "first_new_token_s")
    cases = ((1, document["empty"]), (document["requests"], full))
    return Section(
        done=(
            "A new scheduler on the journal of a dead one, with live requests of "
            f"{document['prompt_tokens']} + {document['output_tokens']} tokens; a simulated worker waits for it. The "
            "first requests go on while the others are rebuilt. The process's own start is in the time: compare the "
            f"first row. The store: {document['store']}."
        ),
        headlines=[
            Headline(f"{figure}{document['requests']:,} live requests", [at_most(seconds, budget_s, "s")]),
            Headline(f"{full['all_rebuilt_s']:.2f} s until all of them are rebuilt"),
        ],
        blocks=[grid(head, [(requests, *(figures[key] for key in keys)) for requests, figures in cases])],
    )


SECTION = PageSection(
    kinds=("recovery_time",),
    title="Recovery",
    question="How long does a new scheduler take to the first new token, with a full journal?",
    command="python -m benchmarks.durability.recovery_time",
    measures=SCHEDULER,
    target="≤ 3 s",
    render=section_of,
)


if __name__ == "__main__":
    main()
