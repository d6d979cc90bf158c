"""`quire generate`: continues one prompt on standard output."""

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

import quire
from quire.cli import options
from quire.cli.output import EXIT_USAGE, err, errors_explained, fail, json_line, write_samples, write_stream
from quire.cli.wait_hint import WaitHint
from quire.params import DEFAULT_ADDRESS, GenerateParams


def generate(
    context: typer.Context,
    prompt: Annotated[str, typer.Argument(help="Text to continue; - reads it from standard input.")],
    address: options.Address = DEFAULT_ADDRESS,
    max_tokens: options.MaxTokens = None,
    min_tokens: options.MinTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: Annotated[
        float | None,
        typer.Option(help="Drop tokens less likely than this fraction of the most likely one's probability."),
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1 discourages tokens of the prompt and the output.")
    ] = None,
    presence_penalty: Annotated[
        float | None, typer.Option(help="Subtracted once from the logit of each token in the output.")
    ] = None,
    frequency_penalty: Annotated[
        float | None, typer.Option(help="Subtracted for each occurrence of a token in the output.")
    ] = None,
    seed: options.Seed = None,
    n: options.N = None,
    best_of: options.BestOf = None,
    beam_width: options.BeamWidth = None,
    length_penalty: options.LengthPenalty = None,
    early_stopping: options.EarlyStopping = None,
    stop: options.Stop = None,
    ignore_eos: options.IgnoreEos = False,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities of this many top tokens, up to 20.")
    ] = None,
    json_schema: options.JsonSchema = None,
    json_object: options.JsonObject = False,
    regex: options.Regex = None,
    choice: options.Choice = None,
    lark: options.Lark = None,
    json_whitespace: options.JsonWhitespace = None,
    timeout_s: options.TimeoutS = None,
    priority: options.Priority = None,
    tenant: options.Tenant = None,
    cache_salt: options.CacheSalt = None,
    session_key: options.SessionKey = None,
    request_id: Annotated[
        str | None, typer.Option(help="Id of the request, for quire pause, resume and cancel. Default: a random one.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole completion as JSON when it has ended.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Print the request's id and its statistics on standard error.")
    ] = False,
) -> None:
    """Continue a prompt. One output streams as it is generated; several are printed as each ends."""
    params = options.given_params(context)
    if logprobs is not None and not as_json:
        fail("--logprobs has an effect only with --json: give both", EXIT_USAGE)
    text = sys.stdin.read() if prompt == "-" else prompt
    with errors_explained(), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        completion = _run(client, text, params, echo=not as_json, names_it=stats)
    if as_json:
        sys.stdout.write(json_line(_fields(completion)))
    if stats:
        err.print(summary(completion), style="dim")


def summary(completion: quire.Completion) -> str:
    """Statistics of a request in one line."""
    usage, timings = completion.usage, completion.timings
    num_samples = len(completion.samples)
    ending = completion.finish_reason.value if num_samples == 1 else f"{num_samples} samples"
    parts = [f"{usage.prompt_tokens} + {usage.completion_tokens} tokens", ending]
    if timings.first_token_s is not None and timings.finished_s is not None:
        parts.append(f"first token after {timings.first_token_s * 1e3:.0f} ms")
        parts.append(f"{usage.completion_tokens / timings.finished_s:.1f} tokens/s")
    if usage.cached_tokens:
        parts.append(f"{usage.cached_tokens} prompt tokens from the prefix cache")
    if completion.memory.saved_blocks:
        parts.append(f"{completion.memory.saving:.1%} of its blocks saved by sharing")
    return ", ".join(parts)


def _run(client: quire.Client, text: str, params: GenerateParams, *, echo: bool, names_it: bool) -> quire.Completion:
    """Generate and print; `names_it`: print the request's id on standard error once it is accepted."""
    with client.stream(text, **params) as stream, WaitHint(client, stream.request_id) as hint:
        accepted = stream.accepted()
        if names_it:
            err.print(f"request {accepted.request_id}", style="dim", markup=False)
        if echo and accepted.num_samples > 1:
            write_samples(stream, hint.stop)
        elif echo:
            write_stream(stream, hint.stop)
        return stream.completion()


def _fields(completion: quire.Completion) -> dict[str, Any]:
    """Fields of a completion for JSON; those of the first sample stand at the top, too."""
    first = asdict(completion.samples[0])
    del first["index"], first["sample_index"]
    return {**first, **asdict(completion)}
