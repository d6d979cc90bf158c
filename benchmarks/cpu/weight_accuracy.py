"""Cost of an accelerator's weights of 8 and 4 bits in accuracy: the demo model's loss and best tokens on unseen text.

The weights, and with e4m3 each row of their products too, are rounded as on a GPU; the products' references compute on
a CPU in float32, which adds no rounding of its own. No clock is read: other work on the machine changes nothing. Prints
a table and writes JSON; takes some minutes.

    python -m benchmarks.cpu.weight_accuracy [--tokens N] [--chunk N] [--output FILE]
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from benchmarks.cpu.accuracy import MODEL, Predictions, StoredModel, held_out
from benchmarks.page_section import Document, Headline, PageSection, ResultRow, Section, at_most, grid, number
from benchmarks.report import RESULTS, table, write_result
from kernels.native.native_kernels import native_kernels
from worker_svc.cpu.host_decoder import HostDecoder
from worker_svc.gpu.quantised_products import quantising_maker
from worker_svc.model.decoder import Decoder, load_decoder
from worker_svc.model.layers import Linear

Form = Literal["float32", "fp8", "int4"]
FORMS: tuple[Form, ...] = ("float32", "fp8", "int4")
NUM_TOKENS, CHUNK = 16_384, 256  # few of them, and many at once: the references widen a weight at each product
MOST_PERCENT: Mapping[Form, float] = {"fp8": 0.5, "int4": 1.0}  # by which the loss may be greater
_HEAD = ("weights", "bytes of layers", "nats a token", "more, %", "mean change", "same best token, %")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightFigure:
    """One form of weights, beside float32."""

    weights: Form
    layer_bytes: int  # that the four products of each layer take
    loss: float  # nats a token
    percent: float  # by which the loss is greater
    mean_change: float  # of a token's nats, up or down alike
    same_best_percent: float  # of tokens whose likeliest successor is the same


def decoder_with(form: Form) -> Decoder:
    """The demo model in float32, with weights in a form."""
    make_product = Linear if form == "float32" else quantising_maker(form)
    return load_decoder(MODEL, torch.float32, torch.device("cpu"), make_product)


def measure(batches: Sequence[Tensor], chunk: int) -> Iterator[WeightFigure]:
    """Yield the figures of every form, float32 first."""
    exact: Predictions | None = None
    for form in FORMS:
        decoder = decoder_with(form)
        found = StoredModel(HostDecoder(decoder, native_kernels())).predict(batches, chunk)
        exact = exact or found
        yield WeightFigure(
            weights=form,
            layer_bytes=_layer_bytes(decoder),
            loss=round(found.loss, 6),
            percent=round(100 * (found.loss / exact.loss - 1), 5),
            mean_change=round(float((found.nats - exact.nats).abs().mean()), 5),
            same_best_percent=round(100 * float((found.best == exact.best).double().mean()), 2),
        )


def _layer_bytes(decoder: Decoder) -> int:
    return sum(
        each.nbytes
        for layer in decoder.layers
        for each in (layer.attention.qkv, layer.attention.out, layer.mlp.up, layer.mlp.down)
    )


def main() -> None:
    """Measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS)
    parser.add_argument("--chunk", type=int, default=CHUNK, help="tokens of a window computed at once")
    parser.add_argument("--output", type=Path, default=RESULTS / "weight_accuracy.json")
    arguments = parser.parse_args()
    batches = held_out(arguments.tokens)
    figures = list(measure(batches, arguments.chunk))
    print(table(list(_HEAD), [list(asdict(figure).values()) for figure in figures]))
    write_result(
        arguments.output,
        "weight_accuracy",
        {
            "model": "demo/model",
            "tokens": sum(batch.numel() for batch in batches),
            "chunk": arguments.chunk,
            "most_percent": dict(MOST_PERCENT),
            "figures": [asdict(figure) for figure in figures],
        },
    )


def section_of(document: Document) -> Section:
    rows: list[ResultRow] = document["figures"]
    headlines = []
    for row in rows[1:]:
        most = document["most_percent"][row["weights"]]
        figure = f"weights {row['weights']}: a loss {number(row['percent'], 3, most)} % greater than float32's"
        headlines.append(Headline(figure, [at_most(row["percent"], most, "%")]))
    cells = [
        (
            row["weights"],
            row["layer_bytes"],
            f"{row['loss']:.6f}",
            f"{row['percent']:.4f}",
            f"{row['mean_change']:.5f}",
            f"{row['same_best_percent']:.2f}",
        )
        for row in rows
    ]
    return Section(
        done=(
            f"The demo model on {document['tokens']:,} tokens of text that it was not trained on, with the weights of "
            "its layers rounded as for an accelerator's runner, and with fp8 each row of their products too. The "
            "products' references compute, on a CPU in float32."
        ),
        headlines=headlines,
        blocks=[grid(_HEAD, cells)],
        versions=("torch",),
    )


SECTION = PageSection(
    kinds=("weight_accuracy",),
    title="Accuracy of fp8 and int4 weights",
    question="What do an accelerator's weights of 8 and 4 bits cost in accuracy?",
    command="python -m benchmarks.cpu.weight_accuracy",
    measures=(
        "worker_svc/model",
        "worker_svc/gpu/quantised_products.py",
        "kernels/products",
        "benchmarks/cpu/weight_accuracy.py",
    ),
    target="loss at most 0.5 % (fp8), 1 % (int4) greater than float32's",
    render=section_of,
)


if __name__ == "__main__":
    main()
