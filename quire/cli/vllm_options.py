"""Options of `vllm serve` that `quire serve` has under another name, or does not need: what to give instead.

Those of the same name and meaning are not here. Knows names alone, no values.
"""

from collections.abc import Mapping

from quire.settings import KEY_ON_COMMAND_LINE
from quire.typed_names import flag_of

_ONE_TOKENIZER = "leave it out: the tokenizer is that of the model's folder"
_FOLDER = "leave it out, or download the model yourself and give its folder"
_ADDRESS = "give --http HOST:PORT, and --listen HOST:PORT for gRPC"
_NO_ADAPTERS = "adapters are not supported: merge them into the model"
_ONE_LIBRARY = "leave it out: structured outputs are made by one library here"
_CHUNKS = "leave it out: prompts are always computed in chunks, of at most --max-batched-tokens"
_NO_STAGES = "a model is not divided by layers: give --tensor-parallel"
_LOG = "give --log-level"

INSTEAD: Mapping[str, str] = {
    "allowed_origins": "give --cors-origins",
    "api_key": KEY_ON_COMMAND_LINE,
    "api_server_count": "give --gateways",
    "attention_backend": "give --attention triton, flashinfer or flash-attn",
    "chat_template": "put it into the model's folder, as chat_template.jinja",
    "compilation_config": "leave it out: kernels are compiled for what is served",
    "config_format": _FOLDER,
    "cpu_offload_gb": "weights stay on the device: give --weight-dtype or --tensor-parallel for less of them",
    "d": "give --workers",  # of -dp
    "data_parallel_size": "give --workers",
    "disable_log_requests": _LOG,
    "disable_log_stats": _LOG,
    "disable_uvicorn_access_log": "give --no-access-log",
    "distributed_executor_backend": "leave it out: --workers and --tensor-parallel start the processes",
    "download_dir": "set HF_HOME, or download the model yourself and give its folder",
    "enable_auto_tool_choice": "leave it out: models whose format of calls is known may call; see --tool-parser",
    "enable_chunked_prefill": _CHUNKS,
    "enable_log_requests": _LOG,
    "enable_lora": _NO_ADAPTERS,
    "enable_prefix_caching": "leave it out: equal prefixes share blocks unless --no-prefix-cache is given",
    "enable_request_id_headers": "leave it out: each answer has its request's id as id and as header",
    "enforce_eager": "give --no-graphs",
    "gpu_memory_utilization": "give --kv-memory-fraction, the part of what the model leaves free, or --kv-memory-bytes",
    "guided_decoding_backend": _ONE_LIBRARY,
    "host": _ADDRESS,
    "kv_cache_dtype": "give --kv-dtype",
    "kv_cache_memory_bytes": "give --kv-memory-bytes",
    "kv_offloading_size": "give --num-host-blocks",
    "kv_transfer_config": "give --role to each worker: prefill or decode",
    "load_format": _FOLDER,
    "long_prefill_token_threshold": _CHUNKS,
    "lora_modules": _NO_ADAPTERS,
    "max_logprobs": "leave it out: a request may ask for 20",
    "max_num_batched_tokens": "give --max-batched-tokens",
    "max_num_scheduled_tokens": "give --max-batched-tokens",
    "model": "give the model as the first argument: quire serve MODEL",
    "no_enable_chunked_prefill": _CHUNKS,
    "no_enable_prefix_caching": "give --no-prefix-cache",
    "num_gpu_blocks_override": "give --num-blocks",
    "override_generation_config": "give --generation-config none, and sampling parameters with each request",
    "p": _NO_STAGES,  # of -pp
    "pipeline_parallel_size": _NO_STAGES,
    "port": _ADDRESS,
    "preemption_mode": "give --preemption",
    "q": "give --weight-dtype",
    "quantization": "give --weight-dtype",
    "revision": _FOLDER,
    "scheduling_policy": "leave it out: requests have a priority; --order orders those of equal priority",
    "seed": "leave it out: give each request a seed, which fixes its output whatever else runs",
    "served_model_name": "give --model-name",
    "skip_tokenizer_init": "leave it out: requests may have token ids, and return_token_ids",
    "speculative_config": "leave it out: nothing is drafted here",
    "ssl_ca_certs": "leave it out: callers of HTTP are known by API keys; see --api-key-file",
    "ssl_certfile": "give --tls-cert",
    "ssl_keyfile": "give --tls-key",
    "stream_interval": "give --stream-interval-ms, in milliseconds",
    "structured_outputs_config": _ONE_LIBRARY,
    "swap_space": "give --num-host-blocks, in blocks",
    "t": "give --tensor-parallel",  # of -tp
    "task": "leave it out: models generate here",
    "tensor_parallel_size": "give --tensor-parallel",
    "tokenizer": _ONE_TOKENIZER,
    "tokenizer_mode": _ONE_TOKENIZER,
    "tool_call_parser": "give --tool-parser",
    "trust_remote_code": "leave it out: no code of a model's folder is run",
    "uds": _ADDRESS,
    "uvicorn_log_level": _LOG,
}


def instead_of(option: str) -> str | None:
    """Sentence on an option of `vllm serve`, which may have underscores: what to give instead; None: not known."""
    name = option.lstrip("-").replace("-", "_")
    instead = INSTEAD.get(name)
    if instead is None:
        return None
    shown = option if len(name) == 1 else flag_of(name)
    return f"{shown} is no option of quire serve; {instead}"
