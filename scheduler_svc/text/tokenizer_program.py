"""A tokenizer in a process of its own: this file is run by path, and imports nothing but tokenizers.

A tokenizer.json is a program of a kind: its regular expressions may take hours for a few lines of text, and it may be
so large or deep that reading it takes minutes. So its process has limits of CPU time and memory.
Messages on the pipes are a length and so many bytes: first the tokenizer, then requests, each with one answer. The
first request is `TRIAL`, with the seconds that it may take, answered with those that reading alone took; each other
one is `ENCODE` or `ENCODE_PLAIN` and a text.
It knows no scheduler.
"""

import json
import resource
import signal
import struct
import sys
import time
from array import array
from typing import Any, BinaryIO

from tokenizers import Tokenizer

LENGTH = struct.Struct("<I")
TRIAL, ENCODE, ENCODE_PLAIN = b"t", b"e", b"p"  # what a request begins with; plain: without special tokens
IDS, REFUSED, USUAL, UNUSUAL = b"i", b"r", b"u", b"x"  # what an answer begins with

MAX_MEMORY_BYTES = 3 << 30  # of the whole process; a tokenizer.json of 15 MB takes 220 MB
MAX_TEXT_CPU_S = 0.5  # besides what follows; a usual short text takes 0.0001 s
MAX_CPU_S_PER_CHAR = 2e-6  # four times of what a usual text takes
_MAX_REASON_CHARS = 2000
_MAX_PART_BYTES = 65_536  # of all that is no vocabulary
_MAX_INSERTED_CHARS = 16
_SAMPLES = (
    "The quick brown fox jumps over the lazy dog, and it isn't 1234567 years old.\n",
    "def add(a, b):\n\treturn a + b  # 你好，世界 Où? Привет 👩‍👩‍👧\r\n\r\n",
    *(each * 512 for each in ("a", "A", "0", " ", "\n", "-", "é", "ab", "a ", "好")),
)
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# Those of well-known models, whose time is in proportion to the text's length.
_USUAL_PATTERNS = {
    *(rf"{_ENDING}|{_WORD}|\p{{N}}{digits}{_REST}" for digits in ("", "+", "{1,3}", "{1,2}")),
    *(
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDING}?|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
        rf"{_ENDING}?|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        for digits in ("", "{1,3}")
    ),
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    r"\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]|\s+(?!\S)|\s",
    r"\p{N}{1,3}",
    r"\p{N}",
    r"[0-9][0-9][0-9]",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"\s+",
    r"\s",
}


def main(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers until the other end closes its pipe."""
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    content = _read(requests)
    tokenizer: Any = None
    while content is not None and (request := _read(requests)) is not None:
        kind, data = request[:1], request[1:]
        try:
            if kind == TRIAL:
                _allow_cpu(float(data))
                begun_s = time.perf_counter()
                tokenizer = usable(Tokenizer.from_buffer(content))
                read_s = time.perf_counter() - begun_s
                answer = _try(tokenizer, json.loads(content)) + str(read_s).encode()
            else:
                text = data.decode()
                _allow_cpu(MAX_TEXT_CPU_S + len(text) * MAX_CPU_S_PER_CHAR)
                encoding = tokenizer.encode_batch_fast([text], add_special_tokens=kind == ENCODE)[0]
                answer = IDS + array("I", encoding.ids).tobytes()
        except BaseException as error:  # the library panics
            answer = REFUSED + (str(error) or type(error).__name__)[:_MAX_REASON_CHARS].encode("utf-8", "replace")
        signal.setitimer(signal.ITIMER_PROF, 0)  # the next request is read in its own time
        answers.write(LENGTH.pack(len(answer)))
        answers.write(answer)
        answers.flush()


def usable(tokenizer: Any) -> Any:
    """The same without truncation and padding, which a file may ask for: they are for training."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def is_usual(document: dict[str, Any]) -> bool:
    """True if every stage of the tokenizer takes time and memory in proportion to the text."""
    parts = [document.get(name) for name in ("normalizer", "pre_tokenizer", "post_processor")]
    return (
        document["model"].get("type") in ("BPE", "WordLevel")
        and len(json.dumps(parts)) <= _MAX_PART_BYTES
        and all(_is_usual_part(each) for each in parts)
    )


def _is_usual_part(part: Any) -> bool:
    if isinstance(part, list):
        return all(_is_usual_part(each) for each in part)
    if not isinstance(part, dict):
        return True
    if part.get("Regex", "\\s") not in _USUAL_PATTERNS or part.get("type") == "Precompiled":
        return False
    inserted = part.get("content") if part.get("type") == "Replace" else part.get("prepend")
    if isinstance(inserted, str) and len(inserted) > _MAX_INSERTED_CHARS:
        return False
    single = part.get("single")  # of a template; more than once the text would be many times as long
    if isinstance(single, list) and sum("Sequence" in each for each in single) > 1:
        return False
    return all(_is_usual_part(each) for each in part.values())


def _try(tokenizer: Any, document: dict[str, Any]) -> bytes:
    """Encode and decode samples in time. Errors are ignored: they concern only the text that raises them."""
    if "Regex" in json.dumps(document.get("decoder")):
        raise ValueError("its decoder has a regular expression, and text is made between two steps of all requests")
    for text in _SAMPLES:
        try:
            ids = tokenizer.encode_batch_fast([text])[0].ids
            tokenizer.decode(ids, skip_special_tokens=False)
        except BaseException:  # a vocabulary need not spell everything
            continue
    return USUAL if is_usual(document) else UNUSUAL


def _allow_cpu(cpu_s: float) -> None:
    """Limit the CPU time from now on; the system ends the process at the limit."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _read(requests: BinaryIO) -> bytes | None:
    head = requests.read(LENGTH.size)
    return requests.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
