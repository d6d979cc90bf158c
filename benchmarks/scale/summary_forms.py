"""Forms of a summary of cached prompts, compared: bytes, false positives, and what they cost a client.

Pure. Each shard has as many hashes of beginnings as a summary may have. A client takes the summaries of all shards,
then one of which a tenth has changed, and asks for prompts of which some shards have a half; the beginnings behind that
half are unknown to all. Takes a minute.

    python -m benchmarks.scale.summary_forms [--shards N ...]
"""

import argparse
import random
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.page_section import Document, Headline, PageSection, Section, grid
from benchmarks.report import RESULTS, table, write_result
from quire.prefix_memory import PrefixMemory
from quire.prompt_beginnings import LENGTHS, Beginning, pack_hashes, unpack_hashes
from scheduler_svc.core.cached_prompts import MOST_HASHES

CHANGED = MOST_HASHES // 10
NUM_ASKED = 300  # prompts
NUM_CACHED = 20  # of them by each shard
NUM_STRANGE = 100_000  # unknown beginnings, for the rate of false positives
_UPDATES = 20


class Form(Protocol):
    """Table that a client makes of summaries, in one form."""

    def pack(self, hashes: Sequence[int]) -> bytes:
        """Summary of a shard, from 64-bit hashes."""

    def take(self, shard: int, packed: bytes) -> None:
        """Take a shard's summary in place of the one before."""

    def find(self, beginnings: Sequence[Beginning]) -> dict[int, int]:
        """Bytes of the longest known beginning of each shard that knows any."""


class ShortHashes:
    """Sorted hashes of 32 bits, which a client turns into one table for all shards: the form in use."""

    def __init__(self) -> None:
        self._memory = PrefixMemory()

    def pack(self, hashes: Sequence[int]) -> bytes:
        return pack_hashes({each & 0xFFFF_FFFF for each in hashes})

    def take(self, shard: int, packed: bytes) -> None:
        self._memory.record_cached(shard, unpack_hashes(packed))

    def find(self, beginnings: Sequence[Beginning]) -> dict[int, int]:
        return self._memory.find(beginnings)


class LongHashes:
    """Sorted hashes of 64 bits, a set for each shard."""

    def __init__(self) -> None:
        self._sets: dict[int, frozenset[int]] = {}

    def pack(self, hashes: Sequence[int]) -> bytes:
        return struct.pack(f"<{len(hashes)}Q", *sorted(hashes))

    def take(self, shard: int, packed: bytes) -> None:
        self._sets[shard] = frozenset(struct.unpack(f"<{len(packed) // 8}Q", packed))

    def find(self, beginnings: Sequence[Beginning]) -> dict[int, int]:
        return _longest(beginnings, {shard: each.__contains__ for shard, each in self._sets.items()})


class BloomFilters:
    """Filters of so many bits a hash, one for each shard."""

    def __init__(self, bits_each: int) -> None:
        self._num_bits = bits_each * MOST_HASHES
        self._num_probes = max(1, round(0.69 * bits_each))
        self._filters: dict[int, bytes] = {}

    def pack(self, hashes: Sequence[int]) -> bytes:
        bits = bytearray(self._num_bits // 8)
        for each in hashes:
            for place in self._places(each):
                bits[place >> 3] |= 1 << (place & 7)
        return bytes(bits)

    def take(self, shard: int, packed: bytes) -> None:
        self._filters[shard] = packed

    def find(self, beginnings: Sequence[Beginning]) -> dict[int, int]:
        return _longest(beginnings, {shard: self._test_of(bits) for shard, bits in self._filters.items()})

    def _test_of(self, bits: bytes) -> Callable[[int], bool]:
        return lambda key: all(bits[place >> 3] >> (place & 7) & 1 for place in self._places(key))

    def _places(self, key: int) -> list[int]:
        low, high = key & 0xFFFF_FFFF, key >> 32 | 1
        return [(low + number * high) % self._num_bits for number in range(self._num_probes)]


def _longest(beginnings: Sequence[Beginning], tests: dict[int, Callable[[int], bool]]) -> dict[int, int]:
    """Ask each shard for each beginning, up to the first that it does not know."""
    found = {}
    for shard, test in tests.items():
        for each in beginnings:
            if not test(each.hash):
                break
            found[shard] = each.num_bytes
    return found


FORMS: dict[str, Callable[[], Form]] = {
    "sorted, 32 bits": ShortHashes,
    "sorted, 64 bits": LongHashes,
    "Bloom, 10 bits": lambda: BloomFilters(10),
    "Bloom, 16 bits": lambda: BloomFilters(16),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FormRow:
    """One form with so many shards."""

    form: str
    shards: int
    summary_bytes: int  # of one shard
    false_positives: float  # part of unknown beginnings that some shard seems to have
    take_us: float  # to take the summary of one shard
    find_us: float  # to look up one prompt


def measure(name: str, num_shards: int) -> FormRow:
    """Measure one form."""
    form, draw = FORMS[name](), random.Random(num_shards)
    asked = [[Beginning(length, draw.getrandbits(64)) for length in LENGTHS] for _ in range(NUM_ASKED)]
    own = [_halves(draw.sample(asked, NUM_CACHED)) for _ in range(num_shards)]
    content = [[*each, *(draw.getrandbits(64) for _ in range(MOST_HASHES - len(each)))] for each in own]
    for shard, hashes in enumerate(content):
        form.take(shard, form.pack(hashes))
    updates = []
    for _ in range(_UPDATES):
        content[0][-CHANGED:] = [draw.getrandbits(64) for _ in range(CHANGED)]
        updates.append(form.pack(content[0]))

    def take_all() -> None:
        for each in updates:
            form.take(0, each)

    def find_all() -> None:
        for each in asked:
            form.find(each)

    took_s, found_s = _seconds(take_all) / _UPDATES, _seconds(find_all) / NUM_ASKED
    strange = [[Beginning(LENGTHS[0], draw.getrandbits(64))] for _ in range(max(1, NUM_STRANGE // num_shards))]
    return FormRow(
        form=name,
        shards=num_shards,
        summary_bytes=len(updates[0]),
        false_positives=sum(bool(form.find(each)) for each in strange) / len(strange),
        take_us=round(took_s * 1e6, 1),
        find_us=round(found_s * 1e6, 1),
    )


def _halves(cached: Sequence[Sequence[Beginning]]) -> list[int]:
    """Hashes of the first half of the beginnings of each prompt."""
    return [each.hash for beginnings in cached for each in beginnings[: len(LENGTHS) // 2]]


def _seconds(work: Callable[[], None]) -> float:
    """Time of the quicker of two runs."""
    times = []
    for _ in range(2):
        began_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - began_s)
    return min(times)


def main() -> None:
    """Read the command line, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shards", type=int, nargs="+", default=[4, 100])
    parser.add_argument("--output", type=Path, default=RESULTS / "summary_forms.json")
    options = parser.parse_args()
    rows = [asdict(measure(name, num_shards)) for num_shards in options.shards for name in FORMS]
    print(table(_HEAD, _cells(rows)))
    write_result(options.output, "summary_forms", {"hashes": MOST_HASHES, "lengths": len(LENGTHS), "rows": rows})


_HEAD = ("shards", "form", "bytes of a summary", "false positives", "taking one, µs", "finding a prompt, µs")


def _cells(rows: Sequence[dict[str, Any]]) -> list[list[object]]:
    return [
        [
            row["shards"],
            row["form"],
            f"{row['summary_bytes']:,}",
            f"{row['false_positives']:.2g}",
            f"{row['take_us']:,.0f}",
            f"{row['find_us']:,.0f}",
        ]
        for row in rows
    ]


def section_of(document: Document) -> Section:
    used = [row for row in document["rows"] if row["form"] == next(iter(FORMS))]
    headlines = [
        Headline(
            f"{row['shards']} shards: a prompt is found in {row['find_us']:,.0f} µs, a summary of "
            f"{row['summary_bytes']:,} bytes taken in {row['take_us']:,.0f} µs"
        )
        for row in used
    ]
    return Section(
        done=(
            f"Summaries of {document['hashes']:,} hashes each, of which a tenth changes at a time; prompts of "
            f"{document['lengths']} beginnings, half of them cached. False positives: unknown beginnings that some "
            f"shard seems to have. In use: the first form."
        ),
        headlines=headlines,
        blocks=[grid(_HEAD, _cells(document["rows"]))],
        versions=(),
    )


SECTION = PageSection(
    kinds=("summary_forms",),
    title="Summaries of caches",
    question="Which form of a summary says best what is cached where?",
    command="python -m benchmarks.scale.summary_forms",
    measures=("quire",),
    render=section_of,
)


if __name__ == "__main__":
    main()
