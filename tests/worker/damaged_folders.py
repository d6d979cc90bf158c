"""Model folders in which one thing is wrong: hundreds of kinds, each made from a small valid folder of a family.

`damages(folder)` lists the kinds that there are for a folder; `random_damage` draws from endlessly many more by a
seed. They spoil a copy, which `spoilt_copy` makes.
"""

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.scheduler.text_tokenizers import byte_level_json
from tests.worker.tiny_models import write_tiny_model

FAMILIES = ("opt", "gpt2", "llama_gqa", "mistral", "qwen2_window", "qwen3", "olmo2")
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
JSON_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.json",
    INDEX,
)
TEXT_FILES = (*JSON_FILES, "tokenizer.json", "chat_template.jinja")
# As they stand in a file: what JSON can say, and what Python's reader takes beyond it.
VALUES = {
    "null": "null",
    "true": "true",
    "text": '"x"',
    "long text": json.dumps("x" * 3000),
    "lines": json.dumps("first\nsecond\r\u2028third"),
    "zero": "0",
    "minus one": "-1",
    "a fraction": "1.5",
    "a million million": "1000000000000",
    "2^63": str(2**63),
    "thirty digits": "9" * 30,
    "five thousand digits": "9" * 5000,
    "1e400": "1e400",
    "NaN": "NaN",
    "-Infinity": "-Infinity",
    "a list": "[]",
    "a list of itself": '[["x"]]',
    "an object": "{}",
    "a lone surrogate": '"\\ud800"',
    "deep": "[" * 5000 + "]" * 5000,
}
ROLES = ("bos_token", "eos_token", "pad_token", "unk_token", "additional_special_tokens", "extra_special_tokens")
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "eos_token_id")
HEADER_DTYPES = ("I8", "U8", "F8_E4M3", "BOOL", "F31", "")


@dataclass(frozen=True)
class Damage:
    """`is_fatal`: the folder cannot be served; else it depends on the family."""

    name: str
    apply: Callable[[Path], object]
    is_fatal: bool


def write_sound_folder(family: str, folder: Path) -> Path:
    """A folder that has every file, all of them right."""
    write_tiny_model(family, folder)
    (folder / "tokenizer.json").write_bytes(byte_level_json())
    special = {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    files: dict[str, object] = {
        "tokenizer_config.json": {**special, "chat_template": "{{ messages }}"},
        "special_tokens_map.json": special,
        "chat_template.json": {"chat_template": "{{ messages }}"},
        "added_tokens.json": {"<extra>": 480},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def spoilt_copy(sound: Path, damage: Damage, at: Path) -> Path:
    """A copy of a sound folder with one thing wrong."""
    shutil.copytree(sound, at)
    damage.apply(at)
    return at


def damages(sound: Path) -> Iterator[Damage]:
    """Yield all kinds of damage for this folder, in a fixed order."""
    config = json.loads((sound / "config.json").read_text())
    for key in config:
        for value in VALUES:
            yield Damage(f"config.json: {key} is {value}", partial(set_value, "config.json", key, value), False)
    for file in TEXT_FILES:
        yield from _broken_files(file)
    for key in SAMPLING:
        for value in VALUES:
            name = f"generation_config.json: {key} is {value}"
            yield Damage(name, partial(set_value, "generation_config.json", key, value), False)
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        for key in (*ROLES, "chat_template", "added_tokens_decoder"):
            for value in VALUES:
                yield Damage(f"{file}: {key} is {value}", partial(set_value, file, key, value), False)
    yield from _broken_weights(sound)
    yield from _broken_index()
    yield from _broken_tokenizer()


def random_damage(sound: Path, seed: int) -> Damage:
    """Bytes of one file changed, cut out or put in at random."""
    chance = random.Random(seed)
    file = chance.choice(sorted(each.name for each in sound.iterdir()))
    return Damage(f"{file}, at random by {seed}", partial(_scramble, file, seed), False)


def set_value(file: str, key: str, value: str, folder: Path) -> None:
    """Puts a value of `VALUES` at a key."""
    content = json.loads((folder / file).read_text())
    content[key] = "\u0000here"
    (folder / file).write_text(json.dumps(content).replace(json.dumps("\u0000here"), VALUES[value]))


def _broken_files(file: str) -> Iterator[Damage]:
    is_json = file.endswith(".json")
    contents = {
        "empty": (b"", is_json),
        "cut off": (b'{"weight_map": {"a', is_json),
        "no UTF-8": (b'{"a": "\xff\xfe"}', True),
        "a list": (b"[1, 2]", is_json),
        "a number": (b"7", is_json),
        "zeros": (bytes(1000), is_json),
        "nested deeply": (b'{"a":' * 3000 + b"1" + b"}" * 3000, is_json),
        "nested a little too deeply": (b'{"a":' * 200 + b"1" + b"}" * 200, is_json),
    }
    for what, (content, is_fatal) in contents.items():
        yield Damage(f"{file} is {what}", partial(_write, file, content), is_fatal)
    yield Damage(f"{file} is far too large", partial(_grow, file), True)
    yield Damage(f"{file} is a folder", partial(_replace, file, lambda path: path.mkdir()), True)
    yield Damage(f"{file} is a pipe", partial(_replace, file, os.mkfifo), True)
    for target in ("/etc/passwd", "../outside", "/dev/zero", "/proc/self/mem", "no-such-file", file):
        yield Damage(f"{file} is a link to {target}", partial(_replace, file, partial(_link, target)), True)


def _broken_weights(sound: Path) -> Iterator[Damage]:
    data = (sound / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + length])
    tensors = [name for name in header if name != "__metadata__"]
    whole = {
        "is empty": b"",
        "has seven bytes": data[:7],
        "ends in its header": data[: 8 + length // 2],
        "ends with its header": data[: 8 + length],
        "lacks its last byte": data[:-1],
        "begins with a header of 2^64 - 1 bytes": b"\xff" * 8 + data[8:],
        "has a header of no bytes": bytes(8) + data[8:],
        "has a header of zeros": data[:8] + bytes(length) + data[8 + length :],
        "is a text": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
    }
    for what, content in whole.items():
        yield Damage(f"{WEIGHTS} {what}", partial(_write, WEIGHTS, content), True)
    for what in ("a list", "text", "null", "deep", "an object"):
        yield Damage(f"{WEIGHTS}: its header is {what}", partial(_write, WEIGHTS, _sealed(VALUES[what], b"")), True)
    rest = data[8 + length :]
    for name in tensors:
        without = {key: value for key, value in header.items() if key != name}
        yield Damage(f"{WEIGHTS} lacks {name}", partial(_write, WEIGHTS, _sealed(json.dumps(without), rest)), False)
    for field, values in {
        "dtype": HEADER_DTYPES,
        "shape": ([], [1], [-1, -1], [0], ["x"], [2**70], None, 7, [[1]]),
        "data_offsets": ([], [0], [0, 1], [8, 0], [-8, 0], [0, 2**70], ["a", "b"], None, [0.0, 4.0]),
    }.items():
        for value in values:
            for name in tensors[:2]:
                changed: dict[str, Any] = {**header, name: {**header[name], field: value}}
                what = f"{WEIGHTS}: {field} of {name} is {value}"
                yield Damage(what, partial(_write, WEIGHTS, _sealed(json.dumps(changed), rest)), True)


def _broken_index() -> Iterator[Damage]:
    for value, spelled in VALUES.items():
        yield Damage(f"{INDEX}: an entry is {value}", partial(_index, f'{{"weight_map": {{"a": {spelled}}}}}'), True)
        yield Damage(f"{INDEX}: weight_map is {value}", partial(_index, f'{{"weight_map": {spelled}}}'), True)
    for name in (
        "../outside.safetensors",
        "/etc/outside.safetensors",
        "sub/part.safetensors",
        "..\\outside.safetensors",
        "no-such.safetensors",
        "pytorch_model.bin",
        "a\u0000.safetensors",
        "a\n.safetensors",
        f"{'a' * 5000}.safetensors",
        "",
        ".",
        "..",
        "~/part.safetensors",
    ):
        text = json.dumps({"weight_map": {"a": name}})
        yield Damage(f"{INDEX} names {name[:30]!r}", partial(_index, text), True)
    many = {str(number): f"{number}.safetensors" for number in range(5000)}
    yield Damage(f"{INDEX} names 5,000 files", partial(_index, json.dumps({"weight_map": many})), True)


def _broken_tokenizer() -> Iterator[Damage]:
    sound = json.loads(byte_level_json())
    for key in sound:
        for value in ("null", "text", "minus one", "a list", "an object", "deep"):
            text = json.dumps({**sound, key: "\u0000here"}).replace(json.dumps("\u0000here"), VALUES[value])
            yield Damage(f"tokenizer.json: {key} is {value}", partial(_write, "tokenizer.json", text.encode()), False)
    vocab = dict.fromkeys(sound["model"]["vocab"], 4_000_000_000)
    for what, model in {
        "ids of 4 * 10^9": {**sound["model"], "vocab": vocab},
        "no tokens": {**sound["model"], "vocab": {}, "merges": []},
        "negative ids": {**sound["model"], "vocab": {"a": -1}},
        "merges of nothing": {**sound["model"], "merges": ["no such"]},
    }.items():
        content = json.dumps({**sound, "model": model, "added_tokens": []}).encode()
        yield Damage(f"tokenizer.json has {what}", partial(_write, "tokenizer.json", content), True)
    for what, template in {
        "numbers": [1, 2],
        "a name without a template": [{"name": "default"}],
        "a template that is a number": [{"name": "default", "template": 1}],
        "names that are lists": [{"name": [], "template": "x"}],
    }.items():
        content = json.dumps({"chat_template": template}).encode()
        damage = partial(_templates, content)
        yield Damage(f"tokenizer_config.json: chat_template is a list of {what}", damage, True)


def _write(file: str, content: bytes, folder: Path) -> None:
    _make_read(file, folder)
    (folder / file).write_bytes(content)


def _make_read(file: str, folder: Path) -> None:
    """Takes away what is read instead of a file."""
    if file == INDEX:
        (folder / WEIGHTS).rename(folder / "model-1.safetensors")
    if file == "chat_template.json":
        (folder / "chat_template.jinja").unlink()


def _index(text: str, folder: Path) -> None:
    _write(INDEX, text.encode(), folder)


def _grow(file: str, folder: Path) -> None:
    _write(file, b"{}", folder)
    os.truncate(folder / file, 1 << 33)  # has no blocks on a disk


def _replace(file: str, make: Callable[[Path], object], folder: Path) -> None:
    _make_read(file, folder)
    (folder / file).unlink(missing_ok=True)
    make(folder / file)


def _link(target: str, path: Path) -> None:
    if target == "../outside":
        (path.parent.parent / "outside").write_text("{}")
    path.symlink_to(target)


def _templates(content: bytes, folder: Path) -> None:
    for name in ("chat_template.jinja", "chat_template.json"):
        (folder / name).unlink()
    (folder / "tokenizer_config.json").write_bytes(content)


def _sealed(header: str, data: bytes) -> bytes:
    return struct.pack("<Q", len(header.encode())) + header.encode() + data


def _scramble(file: str, seed: int, folder: Path) -> None:
    chance = random.Random(seed)
    content = bytearray((folder / file).read_bytes())
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(content) + 1)
        match chance.randrange(4):
            case 0:
                content[at : at + 1] = bytes([chance.randrange(256)])
            case 1:
                del content[at : at + chance.randint(1, 200)]
            case 2:
                content[at:at] = chance.randbytes(chance.randint(1, 50))
            case _:
                content[at:at] = chance.choice(sorted(VALUES.values())).encode()
    (folder / file).write_bytes(content)
