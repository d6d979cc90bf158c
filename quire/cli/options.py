"""Options that several commands take, and how they become parameters of a request."""

from typing import Annotated, Any, Literal

import typer

from quire.params import GenerateParams

CONNECT_TIMEOUT_S = 1.0  # a person waits: say soon that nothing answers


def of_any_level(context: typer.Context, parameter: typer.CallbackParam, value: str) -> str:
    """The value of an option that groups take too: where it was typed, before the command's name or behind it.

    Raises typer.BadParameter if it was typed at both places with different values: one of them would be ignored.
    """
    name = str(parameter.name)
    typed: list[str] = [value] if is_typed(context, name) else []
    above: Any = context.parent
    while above is not None:
        if is_typed(above, name):
            typed.append(above.params[name])
        above = above.parent
    if len(set(typed)) > 1:
        raise typer.BadParameter(f"is given as {' and as '.join(reversed(typed))}: give it once")
    return typed[0] if typed else value


def is_typed(context: Any, name: str) -> bool:
    """Whether the command line has the parameter: not a variable, not a default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


Address = Annotated[
    str,
    typer.Option(
        "--address",
        "-a",
        envvar="QUIRE_ADDRESS",
        callback=of_any_level,
        help="Where the server listens, host:port; several with commas between.",
    ),
]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", help="Longest output, in tokens.")]
MinTokens = Annotated[int | None, typer.Option(help="Shortest output, in tokens.")]
Temperature = Annotated[float | None, typer.Option("--temperature", "-t", help="0 is greedy.")]
TopK = Annotated[int | None, typer.Option(help="Choose among the k most likely tokens.")]
TopP = Annotated[float | None, typer.Option(help="Choose among the most likely tokens that reach this probability.")]
MinP = Annotated[float | None, typer.Option(help="Leave out tokens less likely than this part of the likeliest.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Above 1 discourages what was said.")]
PresencePenalty = Annotated[float | None, typer.Option(help="Taken once from the logits of tokens in the output.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="Taken for each occurrence in the output.")]
N = Annotated[int | None, typer.Option("--n", help="Outputs that come back.")]
BestOf = Annotated[int | None, typer.Option(help="Draw so many outputs, return the --n likeliest.")]
BeamWidth = Annotated[int | None, typer.Option(help="Search for the likeliest outputs with so many beams.")]
LengthPenalty = Annotated[
    float | None, typer.Option(help="With --beam-width: above 0 favours long outputs, below 0 short ones.")
]
EarlyStopping = Annotated[
    Literal["true", "false", "never"] | None,
    typer.Option(help="With --beam-width: end the search as soon as so many outputs have ended."),
]
Priority = Annotated[int | None, typer.Option(min=-1000, max=1000, help="Lower is served first. Default: 0.")]
Tenant = Annotated[str | None, typer.Option(help="On whose behalf; tenants share no prefixes.")]
CacheSalt = Annotated[str | None, typer.Option(help="Share prefixes with requests of the same salt alone.")]
Seed = Annotated[int | None, typer.Option(help="Makes the draw repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the output at this text; may be given several times.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-sequence token.")]
TimeoutS = Annotated[float | None, typer.Option(help="End the request after so many seconds.")]


EARLY_STOPPING: dict[str | None, bool | str | None] = {None: None, "true": True, "false": False, "never": "never"}


def request_params(**given: object) -> GenerateParams:
    """The parameters that were given; what was not is left to the server."""
    return {  # type: ignore[return-value]
        name: value
        for name, value in given.items()
        if value is not None and value is not False and value != []  # 0 is a value
    }
