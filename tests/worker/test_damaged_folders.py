"""Damaged model folders: any fault gives one line that says what to change; never a traceback, never a hang."""

import random
import shutil
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.worker.damaged_folders import FAMILIES, Damage, damages, random_damage, spoilt_copy, write_sound_folder
from tests.worker.forked_worker import run_worker
from worker_svc.checkpoint.checkpoint_error import CheckpointError
from worker_svc.start.preflight import check_model

NUM_RANDOM = 100
NUM_OF_OTHERS = 250
MOST_CHARACTERS = 1000


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sound_folder("llama_gqa", tmp_path_factory.mktemp("sound"))


def refusals(sound: Path, kinds: Iterable[Damage], at: Path) -> dict[str, str | None]:
    """Refusal of each kind of damage; None if the folder can be served all the same."""
    found: dict[str, str | None] = {}
    for damage in kinds:
        folder = spoilt_copy(sound, damage, at / "model")
        try:
            check_model(str(folder))
            found[damage.name] = None
        except CheckpointError as error:
            found[damage.name] = str(error)
        except BaseException as error:
            raise AssertionError(f"{damage.name}: {type(error).__name__}: {error}") from error
        shutil.rmtree(folder)
    return found


def sample(family: str, kinds: list[Damage]) -> list[Damage]:
    """Sample all damages of a LLaMA, some of the others: most differ by the family's config alone."""
    return kinds if family == "llama_gqa" else random.Random(family).sample(kinds, NUM_OF_OTHERS)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_kind_of_damage_is_refused_in_words_or_does_not_matter(family: str, tmp_path: Path) -> None:
    sound = write_sound_folder(family, tmp_path / "sound")
    check_model(str(sound))
    kinds = list(damages(sound))
    assert len({each.name for each in kinds}) == len(kinds) > 800
    kinds = sample(family, kinds)
    found = refusals(sound, kinds, tmp_path)
    assert not [each.name for each in kinds if each.is_fatal and found[each.name] is None]
    for name, said in found.items():
        if said is None:
            continue
        file = name.split()[0].rstrip(":")
        assert said.isprintable(), name
        assert len(said) < MOST_CHARACTERS, name
        assert file in said or name.startswith("model.safetensors"), (name, said)
        if ": " in name and " is " in name and file.endswith("config.json") and "chat_template" not in name:
            key = name.split(": ")[1].split(" is ")[0]
            assert key in said or "JSON" in said or "levels" in said or "tensor" in said, (name, said)


@pytest.mark.parametrize("part", range(3))
def test_random_damage_is_refused_in_words_or_does_not_matter(part: int, llama: Path, tmp_path: Path) -> None:
    seeds = range(part * NUM_RANDOM, (part + 1) * NUM_RANDOM)
    refusals(llama, (random_damage(llama, seed) for seed in seeds), tmp_path)


PROCESSES = (
    "config.json: num_attention_heads is zero",
    "config.json: num_hidden_layers is minus one",
    "config.json: max_position_embeddings is a million million",
    "config.json: vocab_size is five thousand digits",
    "config.json: rope_parameters is deep",
    "config.json: hidden_act is lines",
    "config.json is no UTF-8",
    "config.json is a pipe",
    "tokenizer.json is cut off",
    "tokenizer.json has ids of 4 * 10^9",
    "tokenizer_config.json: chat_template is a list of numbers",
    "chat_template.jinja is no UTF-8",
    "chat_template.jinja is a link to /etc/passwd",
    "generation_config.json: temperature is text",
    "model.safetensors ends in its header",
    "model.safetensors.index.json: an entry is zero",
    "model.safetensors.index.json names '../outside.safetensors'",
)


@pytest.mark.parametrize("name", PROCESSES)
def test_a_workers_process_ends_with_one_line_and_exit_code_2(name: str, llama: Path, tmp_path: Path) -> None:
    (damage,) = (each for each in damages(llama) if each.name == name)
    folder = spoilt_copy(llama, damage, tmp_path / "model")
    completed = run_worker("--model", str(folder), "--device", "cpu", "--num-blocks", "16", "--threads", "1")
    assert completed.returncode == 2
    (line,) = completed.stderr.splitlines()
    assert line.startswith("worker: ")
