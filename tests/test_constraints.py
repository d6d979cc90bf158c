"""Pinned versions: they fit whichever build of torch pip finds. Installs nothing and needs no network."""

import re

from tests.services import ROOT

# What torch's builds for CUDA require, which are those that pip takes by itself; its CPU builds require none.
TRITON_OF_TORCH = {"2.13.0": "3.7.1"}


def test_triton_is_the_release_that_torch_requires_where_it_is_built_for_cuda() -> None:
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    assert pins["triton"] == TRITON_OF_TORCH[pins["torch"]], "pip finds no torch that fits both"
