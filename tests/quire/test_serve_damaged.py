"""Damaged model folders end `quire serve` itself with one line; `make fuzz` has more of the kinds."""

from pathlib import Path

import pytest

from tests.quire.damaged_service import faults_of_serving
from tests.worker.damaged_folders import damages, spoilt_copy, write_sound_folder

KINDS = (
    "config.json is nested deeply",
    "config.json is a pipe",
    "tokenizer.json is cut off",
    "tokenizer.json has ids of 4 * 10^9",
    "tokenizer_config.json: chat_template is a list of numbers",
    "chat_template.jinja is no UTF-8",
    "model.safetensors ends in its header",
    "model.safetensors.index.json names '../outside.safetensors'",
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sound_folder("llama_gqa", tmp_path_factory.mktemp("sound"))


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_folder_ends_quire_serve_with_one_line_and_exit_code_2(
    name: str, sound: Path, tmp_path: Path
) -> None:
    (damage,) = (each for each in damages(sound) if each.name == name)
    assert faults_of_serving(spoilt_copy(sound, damage, tmp_path / "model")) == []
