"""Default sampling parameters of a model, from generation_config.json, for requests that leave them out."""

from dataclasses import dataclass
from pathlib import Path

from worker_svc.checkpoint.json_file import JsonTable, read_optional_table

GENERATION_FILE = "generation_config.json"
_SMALLEST = 1e-6  # least value of a parameter that must be positive
_MOST_TOP_K = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSamplingDefaults:
    """Default sampling parameters; None: the file has none."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def read_sampling_defaults(folder: Path) -> ModelSamplingDefaults:
    """Read the defaults. Raises CheckpointError for a value that no request may have. Ignores `do_sample`, as vLLM."""
    table = read_optional_table(folder, GENERATION_FILE)
    return ModelSamplingDefaults(
        temperature=_number(table, "temperature", 0.0, 100.0),
        top_k=_top_k(table),
        top_p=_number(table, "top_p", _SMALLEST, 1.0),
        min_p=_number(table, "min_p", 0.0, 1.0),
        repetition_penalty=_number(table, "repetition_penalty", 0.01, 100.0),
    )


def _number(table: JsonTable, key: str, least: float, most: float) -> float | None:
    if key not in table:
        return None
    value = table.number(key)
    if not least <= value <= most:
        table.refuse(key, f"must be from {least:g} to {most:g}", "correct it, or give --generation-config none")
    return value


def _top_k(table: JsonTable) -> int | None:
    """Read top_k; None, as for 0: both mean all tokens."""
    if "top_k" not in table:
        return None
    return table.integer("top_k", least=0, most=_MOST_TOP_K) or None
