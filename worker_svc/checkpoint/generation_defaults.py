"""Default sampling parameters of a model, from generation_config.json, for requests that leave them out."""

from pathlib import Path

from common.sampling_params import NUMERIC_PARAMS, NumericParam
from worker_svc.checkpoint.json_file import JsonTable, read_optional_table

GENERATION_FILE = "generation_config.json"
_MOST_WHOLE = 1 << 22


def read_sampling_defaults(folder: Path) -> dict[str, float]:
    """The numeric parameters that the file gives, by name. Ignores `do_sample`, as vLLM.

    Raises CheckpointError for a value that no request may have.
    """
    table = read_optional_table(folder, GENERATION_FILE)
    values = {each.name: _value(table, each) for each in NUMERIC_PARAMS if each.name in table}
    return {name: value for name, value in values.items() if value is not None}


def _value(table: JsonTable, param: NumericParam) -> float | None:
    """The value; None if it is below 1 where at least 1 is needed, as in top_k, where 0, and in vLLM -1, means all."""
    if param.is_whole:
        value = table.integer(param.name, least=-1, most=_MOST_WHOLE)
        return value if value > 0 else None
    number = table.number(param.name)
    if not param.allows(number):
        table.refuse(param.name, f"must be {param.range}", "correct it, or give --generation-config none")
    return number
