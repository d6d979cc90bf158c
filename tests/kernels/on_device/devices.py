"""The device and the dtypes that a kernel can be tested on here."""

import torch

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# The interpreter's arithmetic on bfloat16 is silently wrong.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if HAS_GPU else [])]
