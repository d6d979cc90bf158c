"""Weights of 4 bits in groups of 128 inputs, each group with a scale and a zero point: quantiser and references.

The numbers are those of GPTQ and AWQ, scale * (code - zero point). In which order codes lie is our own: a word has
codes of inputs that are 16 apart, so that 16 words, shifted, are a tile of a product. Knows no layers.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.products.output_slices import output_slices

GROUP = 128  # inputs that share a scale and a zero point
CODES_PER_WORD = 8
WORDS = GROUP // CODES_PER_WORD  # of a group of one output
LARGEST = 15
# Torch divides a tensor by a number on a CPU, and multiplies it with the number's inverse on a GPU: more than half of
# the scales differ by an ulp then, and now and then a code. Products with a number are equal bits everywhere.
_PART = 1 / LARGEST
BITS = 4
# A code in the lowest bits of the mantissa of such a number is that number more: its bits, and the number.
FLOAT16_BASE_BITS, FLOAT16_BASE = 0x6400, 1024.0
BFLOAT16_BASE_BITS, BFLOAT16_BASE = 0x4300, 128.0


class Int4Matrix(NamedTuple):
    """Weight [N, K] of 4 bits. Input 128 g + 16 i + j is in bits 4 i to 4 i + 3 of word 16 g + j."""

    codes: Tensor  # [N, K / 8] int32, contiguous
    scales: Tensor  # [K / 128, N], contiguous
    zeros: Tensor  # [K / 128, N] uint8, 0 to 15, contiguous

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The numbers, [N, K], each rounded once."""
        numbers = _unpacked(self.codes) - self.zeros.t().unsqueeze(2).int()
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (numbers * self.scales.t().unsqueeze(2).to(wide)).to(dtype).flatten(1)


def quantise_groups(weight: Tensor) -> Int4Matrix:
    """Round each group of 128 inputs of an output to 16 steps between its least and its greatest number, or zero.

    weight: [N, K], K a multiple of 128; scales get its dtype
    """
    groups = weight.view(len(weight), -1, GROUP).float()
    least, greatest = groups.amin(2).clamp(max=0.0), groups.amax(2).clamp(min=0.0)
    scales = ((greatest - least) * _PART).to(weight.dtype)
    scales = torch.where(scales > 0, scales, 1.0).to(weight.dtype)
    steps = scales.float()
    zeros = (-least / steps).round_().clamp_(0, LARGEST)
    codes = ((groups / steps.unsqueeze(2)).round_() + zeros.unsqueeze(2)).clamp_(0, LARGEST)
    return Int4Matrix(_packed(codes.int()), scales.t().contiguous(), zeros.t().to(torch.uint8).contiguous())


def quantise_weight(weight: Tensor) -> Int4Matrix:
    """Groups of a weight, quantised as `quantise_groups` does, some outputs at a time."""
    parts = [quantise_groups(part) for part in output_slices(weight)]
    codes, scales, zeros = zip(*parts, strict=True)
    return Int4Matrix(torch.cat(codes), torch.cat(scales, 1), torch.cat(zeros, 1))


def int4_product(x: Tensor, weight: Int4Matrix, bias: Tensor | None, num_arrived: Tensor) -> Tensor:
    """X W^T + b, with the weight rounded to the dtype of x.

    x:           [T, K], contiguous rows
    weight:      [N, K]
    bias:        [N], of the dtype of x
    num_arrived: int32, as `arrival_counters` makes it; zeros before and after
    returns      [T, N]
    """
    return F.linear(x, weight.dequantised(x.dtype), bias)


def _packed(codes: Tensor) -> Tensor:
    """Words [N, K / 8] of codes [N, groups, 128] int32."""
    tiles = codes.view(*codes.shape[:2], CODES_PER_WORD, WORDS)
    words = torch.zeros_like(tiles[:, :, 0])
    for place in range(CODES_PER_WORD):
        words |= tiles[:, :, place] << BITS * place
    return words.flatten(1)


def _unpacked(words: Tensor) -> Tensor:
    """Codes [N, groups, 128] int32."""
    shifts = torch.arange(0, CODES_PER_WORD * BITS, BITS, dtype=torch.int32, device=words.device)
    codes = (words.view(len(words), -1, 1, WORDS) >> shifts.view(-1, 1)) & LARGEST
    return codes.flatten(2)
