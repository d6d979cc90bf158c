"""Devices on which the Triton kernels run.

The interpreter must be switched on before Triton is first imported, and other tests of the suite import it through
transformers. So without a GPU the files here are not collected, unless the process was started for them
(`TRITON_INTERPRET=1`), which `tests/kernels/test_on_device.py` does.
"""

import os

import torch

torch.set_num_threads(1)
collect_ignore_glob: list[str] = []
if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob.append("test_*.py")
