"""Tests of whole processes on a GPU, for `make gpu-check`; without one they are not collected.

`ON_GPU_TESTS=cpu` collects them all the same, with workers on the CPU: that shows the tests themselves to be right.
"""

import os

import torch

collect_ignore_glob: list[str] = []
if not torch.cuda.is_available() and os.environ.get("ON_GPU_TESTS") != "cpu":
    collect_ignore_glob.append("test_*.py")
