"""The device, its family and the dtypes that a kernel can be tested on here."""

import pytest
import torch

from kernels.attention.device_family import family_of

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
FAMILY = family_of(DEVICE)  # whose configurations a worker launches here
HAS_E4M3 = not HAS_GPU or FAMILY.has_e4m3
needs_e4m3 = pytest.mark.skipif(not HAS_E4M3, reason="e4m3 needs compute capability 8.9 or more")
E4M3 = torch.float8_e4m3fn
IN_E4M3 = pytest.param(E4M3, marks=needs_e4m3)  # a value of a test's parameter
# The interpreter's arithmetic on bfloat16 is silently wrong.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]
