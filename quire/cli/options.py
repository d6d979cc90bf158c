"""Options that several commands share, and their conversion to parameters of a request."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from quire.cli.flags import name_field
from quire.params import GenerateParams

CONNECT_TIMEOUT_S = 1.0  # short, since a person waits


def of_any_level(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """The value of an option that may stand before the command's name (for its group) or after it.

    Raises typer.BadParameter if both places have different values: one of them would be ignored.
    """
    name = str(parameter.name)
    typed: list[str] = [value] if is_typed(context, name) else []
    above: Any = context.parent
    while above is not None:
        if is_typed(above, name):
            typed.append(above.params[name])
        above = above.parent
    if len(set(typed)) > 1:
        raise typer.BadParameter(f"is given as {' and as '.join(reversed(typed))}: give it only once")
    return typed[0] if typed else value


def is_typed(context: Any, name: str) -> bool:
    """True if the parameter stands on the command line, rather than in a variable or as a default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


Address = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        envvar="QUIRE_ADDRESS",
        callback=of_any_level,
        help="Address of the server, host:port; several with commas between.",
    ),
]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", help="Maximum length of the output, in tokens.")]
MinTokens = Annotated[int | None, typer.Option(help="Minimum length of the output, in tokens.")]
Temperature = Annotated[float | None, typer.Option("--temperature", "-t", help="Sampling temperature; 0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Sample from the k most likely tokens.")]
TopP = Annotated[
    float | None, typer.Option(help="Sample from the most likely tokens that together reach this probability.")
]
N = Annotated[int | None, typer.Option("--n", help="Number of outputs to return.")]
BestOf = Annotated[int | None, typer.Option(help="Sample this many outputs and return the --n most likely.")]
BeamWidth = Annotated[int | None, typer.Option(help="Beam search with this many beams.")]
LengthPenalty = Annotated[
    float | None,
    typer.Option(help="With --beam-width: exponent of the length; above 0 favours long outputs, below 0 short ones."),
]
EarlyStopping = Annotated[
    Literal["true", "false", "never"] | None,
    typer.Option(help="With --beam-width: end the search as soon as that many outputs have ended."),
]
Priority = Annotated[
    int | None, typer.Option(min=-1000, max=1000, help="Priority class; lower is served first. Default: 0.")
]
Tenant = Annotated[str | None, typer.Option(help="Tenant of the request; tenants share no prefixes.")]
CacheSalt = Annotated[str | None, typer.Option(help="Share cached prefixes only with requests of the same salt.")]
SessionKey = Annotated[str | None, typer.Option(help="Of several shards, all requests with the same key go to one.")]
Seed = Annotated[int | None, typer.Option(help="Seed of the sampling; the same seed gives the same output.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the output at this text; repeatable.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Continue past the end-of-sequence token.")]
JsonSchema = Annotated[
    str | None,
    typer.Option(help="Output JSON that this schema allows: a file, or the schema itself, which begins with {."),
]
JsonObject = Annotated[bool, typer.Option("--json-object", help="Output any JSON object.")]
Regex = Annotated[str | None, typer.Option(help="Output a text that this regular expression matches whole.")]
Choice = Annotated[list[str] | None, typer.Option(help="Output one of these texts; repeatable.")]
Lark = Annotated[str | None, typer.Option(help="Output a text of the grammar in this file, in Lark's syntax.")]
JsonWhitespace = Annotated[
    Literal["compact", "flexible"] | None,
    typer.Option(help="Space between the tokens of JSON outputs: none, or as the model likes. Default: compact."),
]
TimeoutS = Annotated[float | None, typer.Option(help="End the request after this many seconds.")]


_CONSTRAINTS = ("json_schema", "json_object", "regex", "choice", "lark")
_EARLY_STOPPING = {"true": True, "false": False, "never": "never"}


def given_params(context: typer.Context) -> GenerateParams:
    """The options of a command that are parameters of a request, as far as they were given."""
    given = {name: value for name, value in context.params.items() if name in GenerateParams.__annotations__}
    if given.get("early_stopping") is not None:
        given["early_stopping"] = _EARLY_STOPPING[given["early_stopping"]]
    _name_constraint(given)
    if (schema := given.get("json_schema")) is not None and not schema.lstrip().startswith("{"):
        given["json_schema"] = file_text("--json-schema", schema)
    if given.get("lark") is not None:
        given["lark"] = file_text("--lark", given["lark"])
    return request_params(**given)


def file_text(option: str, path: str) -> str:
    """The text of the file that an option names, in UTF-8 whatever the locale. Raises typer.BadParameter."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise typer.BadParameter(f"{path} cannot be read: {why}", param_hint=option) from error


def _name_constraint(given: Mapping[str, object]) -> None:
    """Has errors name the flag that constrains the output. Raises typer.BadParameter if several do."""
    flags = [f"--{name.replace('_', '-')}" for name in _CONSTRAINTS if given.get(name)]
    if len(flags) > 1:
        raise typer.BadParameter(f"{' and '.join(flags)} cannot go together: give one of them")
    if flags:
        name_field("structured_output", flags[0])


def request_params(**given: object) -> GenerateParams:
    """The parameters that were given; the server has defaults for the others."""
    return {  # type: ignore[return-value]
        name: value
        for name, value in given.items()
        if value is not None and value is not False and value not in ([], ())  # 0 is a value
    }
