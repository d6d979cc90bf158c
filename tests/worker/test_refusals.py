"""Settings that a worker cannot start with are refused before torch is loaded, and named as they were typed.

Through the worker's own entry point, and through the check that `quire serve` makes before it starts anything.
"""

import os
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import pytest

import worker_svc
from quire.cli.serve_settings import settle_all
from quire.cli.supervisor.child import StartFailedError
from quire.cli.supervisor.model_check import check_model
from quire.typed_names import flag_of
from tests.worker.tiny_models import write_tiny_model
from worker_svc import __main__ as worker_main


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Settings that do not go with the tiny model, 256 positions in float32, or with each other."""

    name: str
    given: dict[str, str]
    said: str  # a pattern, with {name} where a setting is called as it was typed
    also: dict[str, str] = field(default_factory=dict)  # always by flags


# A block of 16 tokens: keys and values of 2 heads of 16 float32 in each of 3 layers, 12288 bytes.
CASES = [
    Case(name="pool of less than a block", given={"kv_memory_bytes": "100"},
         said="^{kv_memory_bytes} 100 is less than the 12288 bytes .*: give at least {kv_memory_bytes} 12288"),
    Case(name="the same in int8", given={"kv_memory_bytes": "100"}, also={"kv_dtype": "int8", "device": "cpu"},
         said="^{kv_memory_bytes} 100 is less than the 3840 bytes"),
    Case(name="the same in bfloat16", given={"kv_memory_bytes": "100", "dtype": "bfloat16"},
         said="^{kv_memory_bytes} 100 is less than the 6144 bytes"),
    Case(name="bytes for less than a sequence", given={"kv_memory_bytes": "30000", "max_model_len": "100"},
         said="^{kv_memory_bytes} 30000 holds 32 tokens, less than one sequence of {max_model_len} 100: "
              "give {kv_memory_bytes} 86016 or more, or {max_model_len} 32 or less"),
    Case(name="blocks for less than a sequence", given={"num_blocks": "2", "max_model_len": "33"},
         said="^{num_blocks} 2 of 16 tokens each holds 32 tokens, .* {max_model_len} 33: give {num_blocks} 3 or more"),
    Case(name="pool of more than the worker's share", given={"num_blocks": "100", "memory_bytes": "1000000"},
         said="^{num_blocks} 100 is a pool of 1228800 bytes, more than the {memory_bytes} 1000000 that weights, "
              "steps and KV pool of a worker may take together: give a smaller pool", also={"device": "cpu"}),
    Case(name="sequence beyond the model's", given={"max_model_len": "99999"},
         said="^{max_model_len} 99999 is more than the 256 positions of the model: give at most {max_model_len} 256"),
    Case(name="fp8 on a CPU", given={"kv_dtype": "fp8", "device": "cpu"},
         said="^{kv_dtype} fp8 needs .*: leave it out, or give --runner device"),
    Case(name="int8 with an accelerator's runner", given={"kv_dtype": "int8", "runner": "device"},
         said="^{kv_dtype} int8 needs .*: leave it out, or give --device cpu and {runner} cpu"),
    Case(name="weights of 4 bits on a CPU", given={"weight_dtype": "int4", "device": "cpu"},
         said="^{weight_dtype} int4 needs the runner of an accelerator: leave it out, or give --runner device"),
    Case(name="int8 weights with torch", given={"weight_dtype": "int8", "kernels": "torch"}, also={"device": "cpu"},
         said="^{weight_dtype} int8 needs native kernels, and {kernels} torch was given: leave one of them out"),
    Case(name="int8 in float16", given={"kv_dtype": "int8", "dtype": "float16"}, also={"device": "cpu"},
         said="^{kv_dtype} int8 .* none for {dtype} float16: give {dtype} bfloat16 or float32"),
    Case(name="ranks that do not divide the model", given={"tensor_parallel": "3"}, also={"device": "cpu"},
         said="^{tensor_parallel} 3 does not divide this model of 4 attention heads, .*: "
              "give {tensor_parallel} 1, 2 or 4"),
    Case(name="a group's pool of less than a block", given={"kv_memory_bytes": "100", "tensor_parallel": "4"},
         also={"device": "cpu"}, said="^{kv_memory_bytes} 100 is less than the 24576 bytes of one block"),
    Case(name="two sizes of the pool", given={"num_blocks": "4", "kv_memory_bytes": "9"},
         said="^{num_blocks} 4 and {kv_memory_bytes} 9 each set the size of the KV pool: give only one of them"),
]  # fmt: skip
WAYS = ("flag", "variable", "key")
# Each is a process: all cases by flags, and some in every other way.
SERVE_CASES = [(case, "serve", "flag") for case in CASES] + [
    (case, section, way)
    for case in [each for each in CASES if len(each.given) == 2 and not each.also][::2]
    for section in ("serve", "worker")
    for way in ("variable", "key")
]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CONFIG", "")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model("llama_gqa", tmp_path_factory.mktemp("tiny")))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_worker_calls_settings_as_they_were_typed(
    case: Case,
    way: str,
    model: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names, flags = give(case.given, way, "worker", tmp_path, monkeypatch)
    flags |= {"model": model, **case.also}
    code, said = worker_end([f"{flag_of(name)}={value}" for name, value in flags.items()], monkeypatch, capsys)
    assert code == 2
    assert_said(said.removeprefix("worker: "), case, names)


@pytest.mark.parametrize(
    ("case", "section", "way"), SERVE_CASES, ids=lambda each: each.name if isinstance(each, Case) else each
)
async def test_quire_serve_calls_settings_as_they_were_typed(
    case: Case, section: str, way: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, flags = give(case.given, way, section, tmp_path, monkeypatch)
    config = tmp_path / "quire.toml"
    with pytest.raises((StartFailedError, ValueError)) as caught:
        settled = settle_all({"model": model, **flags, **case.also}, config if config.exists() else None)
        await check_model(settled.worker, os.environ, names=settled.worker_names)
    assert_said(str(caught.value).removeprefix("worker: "), case, names)


def give(
    given: dict[str, str], way: str, section: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, str], dict[str, str]]:
    """Give the settings in one way. Returns their names in that way, and those that remain flags."""
    if way == "flag":
        return {name: flag_of(name) for name in given}, dict(given)
    if way == "variable":
        names = {name: f"QUIRE_{section.upper()}_{name.upper()}" for name in given}
        for name, variable in names.items():
            monkeypatch.setenv(variable, given[name])
        return names, {}
    file = folder / "quire.toml"
    file.write_text("\n".join([f"[{section}]", *(f'{name} = "{value}"' for name, value in given.items())]))
    monkeypatch.setenv("QUIRE_CONFIG", str(file))
    return {name: f"[{section}] {name}" for name in given}, {}


def worker_end(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[object, str]:
    """Exit code and words of a worker that may not come as far as torch."""
    monkeypatch.setattr(sys, "argv", ["worker", *arguments])
    loaded = ModuleType("worker_svc.process")  # which has no `run`
    monkeypatch.setitem(sys.modules, "worker_svc.process", loaded)
    monkeypatch.setattr(worker_svc, "process", loaded, raising=False)
    with pytest.raises(SystemExit) as ended:
        worker_main.main()
    return ended.value.code, capsys.readouterr().err


def assert_said(said: str, case: Case, names: dict[str, str]) -> None:
    pattern = re.sub(r"\{(\w+)\}", lambda found: re.escape(names.get(found[1], flag_of(found[1]))), case.said)
    assert re.search(pattern, said), (pattern, said)
    assert len(said.strip().splitlines()) == 1
    for name in case.given:  # neither as a field nor as a flag that nobody typed
        rest = said.replace(names[name], "")
        assert "_" not in name or name not in rest, said
        assert names[name] == flag_of(name) or f" {flag_of(name)} " not in rest, said
