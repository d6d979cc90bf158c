"""Class names of the product: each stands for one thing, so that a search for it finds one class."""

import ast
from collections import defaultdict
from pathlib import Path

from google.protobuf.message import Message

from quire.v1 import cluster_pb2, inference_pb2, journal_pb2, worker_pb2

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("common", "kernels", "quire", "scheduler_svc", "worker_svc")
GENERATED = ROOT / "quire" / "v1"

# Modules whose classes are the plain form of the protobuf messages of the same name: the SDK, and the wire of a step.
PLAIN_FORMS = {
    "quire": {"cluster_pb2", "inference_pb2", "journal_pb2"},
    "common/step.py": {"worker_pb2"},
    "common/sampling_params.py": {"worker_pb2"},
    "worker_svc/checkpoint/tokenizer_files.py": {"worker_pb2"},
    "worker_svc/description.py": {"worker_pb2"},
}
# The class that admits requests, and the journal's message of an admission, which is always `journal_pb2.Admission`.
ALLOWED = frozenset({"Admission"})
# Clashes of the samplers with messages, which wait for a change of that part.
CLASHES = frozenset({"TokenLogprobs"})
EXCEPTIONS = ALLOWED | CLASHES


def product_classes() -> dict[str, list[Path]]:
    """Files that define a public class, by its name; generated code left out."""
    found = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if path.is_relative_to(GENERATED):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found[node.name].append(path.relative_to(ROOT))
    return found


def messages() -> dict[str, set[str]]:
    """Generated modules that define a message, by its name."""
    found = defaultdict(set)
    for module in (cluster_pb2, inference_pb2, journal_pb2, worker_pb2):
        for name, value in vars(module).items():
            if isinstance(value, type) and issubclass(value, Message):
                found[name].add(module.__name__.rpartition(".")[2])
    return found


def is_plain_form(path: Path, modules: set[str]) -> bool:
    return any(path.is_relative_to(place) and forms & modules for place, forms in PLAIN_FORMS.items())


def test_no_two_classes_of_the_product_have_one_name() -> None:
    twice = {
        name: [str(path) for path in paths]
        for name, paths in product_classes().items()
        if len(paths) > 1 and name not in EXCEPTIONS
    }
    assert twice == {}


def test_a_class_named_like_a_message_is_its_plain_form() -> None:
    known = messages()
    clashes = {
        name: [str(path) for path in paths]
        for name, paths in product_classes().items()
        if name in known and name not in EXCEPTIONS and not all(is_plain_form(path, known[name]) for path in paths)
    }
    assert clashes == {}
