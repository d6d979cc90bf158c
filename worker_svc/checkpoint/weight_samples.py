"""Samples of weight files that tell models apart: parts of each tensor, at a cost that hardly grows with the model.

Knows no digest, and no values: only bytes.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from worker_svc.checkpoint.folder_files import reading
from worker_svc.checkpoint.weight_files import HEADER_LENGTH_BYTES, TensorHeader, file_headers

_SAMPLE_BYTES = 4096
_MOST_SAMPLES = 2048  # of all tensors together, 8 MiB, unless the tensors themselves are more
_MOST_PER_TENSOR = 3  # before size is looked at: beginning, middle, end
_MOST_TENSORS = 1 << 16  # sampled; of more, evenly spaced ones: no model has so many


def weight_samples(files: Sequence[Path]) -> Iterator[list[bytes]]:
    """Yields for each file its size, its header, and samples of its tensors, in the order in which they lie.

    Each tensor has its beginning, middle and end in it; where there are more than 682 tensors, fewer of these,
    at least the beginning. What is left of the number of samples goes to tensors by their size, evenly spaced; a tensor
    that is no larger than its samples is taken whole. Raises CheckpointError for a damaged file.
    """
    headers = [sorted(file_headers(file).values(), key=lambda header: header.begin) for file in files]
    num_tensors = sum(map(len, headers))
    num_bytes = sum(header.end - header.begin for each in headers for header in each)
    num_least = max(1, min(_MOST_PER_TENSOR, _MOST_SAMPLES // max(1, num_tensors)))
    num_free = max(0, _MOST_SAMPLES - num_least * num_tensors)
    stride = -(-num_tensors // _MOST_TENSORS) or 1
    for file, of_file in zip(files, headers, strict=True):
        with reading(file), file.open("rb", buffering=0) as stream:
            parts = [file.stat().st_size.to_bytes(8, "little"), _header(stream)]
            for header in of_file[::stride]:
                num_samples = num_least + num_free * (header.end - header.begin) // max(1, num_bytes)
                parts += _samples(stream, header, num_samples)
        yield parts


def _header(stream: BinaryIO) -> bytes:
    """The header's text, which was checked."""
    return stream.read(int.from_bytes(stream.read(HEADER_LENGTH_BYTES), "little"))


def _samples(stream: BinaryIO, header: TensorHeader, num_samples: int) -> Iterator[bytes]:
    size = header.end - header.begin
    if size <= num_samples * _SAMPLE_BYTES:
        stream.seek(header.begin)
        yield stream.read(size)
        return
    last = size - _SAMPLE_BYTES
    for sample in range(num_samples):
        stream.seek(header.begin + last * sample // max(1, num_samples - 1))
        yield stream.read(_SAMPLE_BYTES)
