"""The device and the dtypes that a kernel can be tested on here."""

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# The interpreter's arithmetic on bfloat16 is silently wrong.
HAS_E4M3 = not HAS_GPU or torch.cuda.get_device_capability() >= (8, 9)
needs_e4m3 = pytest.mark.skipif(not HAS_E4M3, reason="e4m3 needs compute capability 8.9 or more")
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]
