"""Cost of int8 in accuracy on a CPU: the demo model's loss, and its best tokens, on text that it was not trained on.

The model runs as the worker runs it: packed weights, native kernels, and a KV pool with scattered blocks. Windows of
text are computed in chunks side by side, so that keys and values are read back from the pool. Two runs on one kind of
processor give the same figures, whatever else it does. Prints a table and writes JSON; takes a minute.

    python -m benchmarks.cpu.accuracy [--tokens N] [--chunk N] [--output FILE]
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Self

import torch
from tokenizers import Tokenizer
from torch import Tensor

from benchmarks.page_section import (
    CPU_WORKER,
    Document,
    Headline,
    PageSection,
    ResultRow,
    Section,
    at_most,
    grid,
    number,
)
from benchmarks.report import RESULTS, ROOT, table, write_result
from demo.train import HELD_OUT_SEED_OFFSET, NUM_HELD_OUT_TOKENS, Settings, windows
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.cpu.start import choose_host
from worker_svc.memory.kv_pool import KVPool
from worker_svc.model.batch import ForwardBatch
from worker_svc.model.decoder import load_decoder

MODEL = ROOT / "demo" / "model"
CHUNK, BLOCK_SIZE = 32, 16
MOST_PERCENT = 0.5  # by which the loss may differ

Storage = Literal["float32", "int8"]
STORAGES: tuple[tuple[Storage, Storage], ...] = (
    ("float32", "float32"),
    ("int8", "float32"),
    ("float32", "int8"),
    ("int8", "int8"),
)


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions for the tokens of all windows, from the tokens before each."""

    nats: Tensor  # [N] float64, of the token that came
    best: Tensor  # [N] int64, the likeliest token

    @property
    def loss(self) -> float:
        """Mean loss in nats a token."""
        return float(self.nats.mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One way to store weights, and keys and values, beside float32 for both."""

    weights: Storage
    kv: Storage
    loss: float  # nats a token
    percent: float  # by which the loss is greater
    mean_change: float  # of a token's nats, up or down alike
    same_best_percent: float  # of tokens whose likeliest successor is the same
    kv_bytes_per_token: int


class StoredModel:
    """A model with weights, and keys and values, stored in one way."""

    def __init__(self, model: HostDecoder, kv_dtype: torch.dtype | None = None) -> None:
        """`kv_dtype`: of keys and values; None: the model's."""
        self._model = model
        self._shape = model.block_shape(BLOCK_SIZE, kv_dtype)

    @classmethod
    def demo(cls, weights: Storage, kv: Storage) -> Self:
        """The demo model, as a worker on a CPU loads it."""
        int8_kv = kv == "int8"
        host = choose_host("native", torch.float32, int8_weights=weights == "int8", int8_kv=int8_kv)
        decoder = load_decoder(MODEL, torch.float32, torch.device("cpu"), host.packing.make_product)
        return cls(HostDecoder(decoder, host.kernels), torch.int8 if int8_kv else None)

    @property
    def kv_bytes_per_token(self) -> int:
        return self._shape.bytes_per_block // BLOCK_SIZE

    def predict(self, batches: Sequence[Tensor], chunk: int) -> Predictions:
        """batches: [windows, tokens] int64 each; their windows are computed side by side, `chunk` tokens at a time."""
        parts = [part for batch in batches for part in self._predict(batch, chunk)]
        return Predictions(torch.cat([part.nats for part in parts]), torch.cat([part.best for part in parts]))

    def _predict(self, batch: Tensor, chunk: int) -> Iterator[Predictions]:
        num_windows, length = batch.shape
        num_blocks = -(-length // BLOCK_SIZE)
        order = torch.randperm(num_windows * num_blocks, generator=torch.Generator().manual_seed(0))
        tables = order.view(num_windows, num_blocks)
        pool = KVPool(self._shape, num_windows * num_blocks, torch.device("cpu"))
        for begin in range(0, length - 1, chunk):  # the last token has no successor
            end = min(begin + chunk, length - 1)
            logits = self._model.forward(_chunk_of(batch, tables, begin, end), pool).float()
            logprobs = logits.log_softmax(1)
            successors = batch[:, begin + 1 : end + 1].reshape(-1, 1)
            yield Predictions(-logprobs.gather(1, successors)[:, 0].double(), logits.argmax(1))


def _chunk_of(batch: Tensor, tables: Tensor, begin: int, end: int) -> ForwardBatch:
    """Compute one chunk: tokens begin to end of every window; returns all their logits."""
    num_windows, size = len(batch), end - begin
    position = torch.arange(begin, end)
    return ForwardBatch(
        token_ids=batch[:, begin:end].flatten(),
        positions=position.repeat(num_windows),
        slot_mapping=(tables[:, position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE).flatten(),
        query_start=torch.arange(0, num_windows * size + 1, size, dtype=torch.int32),
        context_lens=torch.full((num_windows,), end, dtype=torch.int32),
        block_tables=tables.to(torch.int32),
        logit_rows=torch.arange(num_windows * size),
        max_query_len=size,
        max_context_len=end,
    )


def held_out(num_tokens: int) -> list[Tensor]:
    """Windows of 256 to 1,024 tokens of the text that tells the loss of the demo model; training saw none of it."""
    settings = Settings(seed=json.loads((MODEL / "training.json").read_text())["seed"])
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    batches = windows(tokenizer, settings.seed + HELD_OUT_SEED_OFFSET, settings.tokens_per_step)
    return [next(batches) for _ in range(max(1, num_tokens // settings.tokens_per_step))]


def measure(batches: Sequence[Tensor], chunk: int) -> Iterator[Figure]:
    """Yield the figures of every way to store, float32 first."""
    exact: Predictions | None = None
    for weights, kv in STORAGES:
        model = StoredModel.demo(weights, kv)
        found = model.predict(batches, chunk)
        exact = exact or found
        yield Figure(
            weights=weights,
            kv=kv,
            loss=round(found.loss, 6),
            percent=round(100 * (found.loss / exact.loss - 1), 5),
            mean_change=round(float((found.nats - exact.nats).abs().mean()), 5),
            same_best_percent=round(100 * float((found.best == exact.best).double().mean()), 2),
            kv_bytes_per_token=model.kv_bytes_per_token,
        )


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=NUM_HELD_OUT_TOKENS)
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens of a window computed at once")
    parser.add_argument("--output", type=Path, default=RESULTS / "accuracy.json")
    arguments = parser.parse_args()
    batches = held_out(arguments.tokens)
    figures = list(measure(batches, arguments.chunk))
    rows = [list(asdict(figure).values()) for figure in figures]
    head = ("weights", "KV", "nats a token", "more, %", "mean change", "same best token, %", "KV bytes a token")
    print(table(head, rows))
    write_result(
        arguments.output,
        "accuracy",
        {
            "model": "demo/model",
            "tokens": sum(batch.numel() for batch in batches),
            "chunk": arguments.chunk,
            "most_percent": MOST_PERCENT,
            "figures": [asdict(figure) for figure in figures],
        },
    )


def section_of(document: Document) -> Section:
    rows: list[ResultRow] = document["figures"]
    most = document["most_percent"]
    headlines = []
    for row in rows[1:]:
        off = abs(row["percent"])
        figure = f"weights {row['weights']}, KV {row['kv']}: a loss {number(off, 4, most)} % off float32's"
        headlines.append(Headline(figure, [at_most(off, most, "%")]))
    head = ("weights", "KV", "nats a token", "more, %", "mean change", "same best token, %", "KV bytes a token")
    cells = [
        (
            row["weights"],
            row["kv"],
            f"{row['loss']:.6f}",
            f"{row['percent']:.5f}",
            f"{row['mean_change']:.5f}",
            f"{row['same_best_percent']:.2f}",
            row["kv_bytes_per_token"],
        )
        for row in rows
    ]
    return Section(
        done=(
            f"The demo model on {document['tokens']:,} tokens of text that it was not trained on, as the worker "
            f"computes it, in chunks of {document['chunk']} tokens that read what was before them from the pool."
        ),
        headlines=headlines,
        blocks=[grid(head, cells)],
        versions=("torch",),
    )


SECTION = PageSection(
    kinds=("accuracy",),
    title="Accuracy of int8",
    question="What do weights, and keys and values, in int8 cost in accuracy?",
    command="python -m benchmarks.cpu.accuracy",
    measures=(*CPU_WORKER, "benchmarks/cpu/accuracy.py"),
    target="loss within 0.5 % of float32's",
    render=section_of,
)


if __name__ == "__main__":
    main()
