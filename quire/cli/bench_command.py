"""`quire bench`: an open-loop load on a running server, and a table of the measurements."""

import asyncio
import json
import uuid
from collections.abc import Callable
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import quire
from quire.cli import options
from quire.cli.load import Lengths, Load, PlannedRequest
from quire.cli.measurements import Measurement, Summary, summarize
from quire.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, err, error_text, errors_explained, fail, out
from quire.params import DEFAULT_ADDRESS, GenerateParams

DEFAULT_NUM_REQUESTS = 100
DEFAULT_PROMPT_LEN = "32-128"
MOST_PLANNED = 1_000_000  # requests, which are all drawn before the first is sent


def bench(
    address: options.Address = DEFAULT_ADDRESS,
    rate: Annotated[float, typer.Option("--rate", "-r", help="Requests per second; inf sends all at once.")] = 4.0,
    num_requests: Annotated[
        int | None,
        typer.Option(
            "--num-requests", min=1, max=MOST_PLANNED, help="Number of requests; 100 unless --duration is given."
        ),
    ] = None,
    duration_s: Annotated[
        float | None, typer.Option("--duration", "--duration-s", help="Seconds during which requests arrive.")
    ] = None,
    prompt_len: Annotated[
        str | None, typer.Option(help="Tokens of a prompt: 128, 64-256 or normal:128:32. Default: 32-128.")
    ] = None,
    output_len: Annotated[str, typer.Option(help="Tokens of an output, in the same forms.")] = "32-128",
    prompt: Annotated[str | None, typer.Option(help="Text of every prompt, instead of random tokens.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals, lengths, prompts and sampling.")] = 0,
    temperature: Annotated[
        float | None, typer.Option(help="Sampling temperature; 0 is greedy. Default: 1, with beams none.")
    ] = None,
    n: options.N = None,
    beam_width: options.BeamWidth = None,
    ignore_eos: Annotated[bool, typer.Option(help="Generate every output to its full length.")] = True,
    timeout_s: options.TimeoutS = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write the summary to this file, as JSON.")
    ] = None,
) -> None:
    """Measure a server under an open-loop Poisson load.

    Prompts share cached prefixes within a run, never with those of an earlier run.
    """
    params = options.request_params(
        temperature=temperature, n=n, beam_width=beam_width, ignore_eos=ignore_eos, timeout_s=timeout_s
    )
    params["cache_salt"] = uuid.uuid4().hex
    with errors_explained():
        _check(rate, num_requests, duration_s, json_file)
        if prompt is not None and prompt_len is not None:
            fail("--prompt-len is for random prompts and --prompt gives a text: leave one of them out", EXIT_USAGE)
        load = Load(
            rate=rate,
            num_requests=num_requests or (DEFAULT_NUM_REQUESTS if duration_s is None else None),
            duration_s=duration_s,
            output_len=_lengths("--output-len", output_len),
            prompt_len=_lengths("--prompt-len", DEFAULT_PROMPT_LEN if prompt_len is None else prompt_len),
            prompt=prompt,
            seed=seed,
        )
        summary = asyncio.run(_measure(address, load, params))
    out.print(report(summary))
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(asdict(summary), indent=2) + "\n")
        except OSError as error:
            fail(f"--json: {json_file} cannot be written: {error.strerror}")
    if summary.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)
    if not summary.num_completed:
        raise typer.Exit(EXIT_FAILED)


def _check(rate: float, num_requests: int | None, duration_s: float | None, json_file: Path | None) -> None:
    """Ends the command if an option cannot be used."""
    if not rate > 0:
        fail(f"--rate is {rate}: give a number above 0", EXIT_USAGE)
    if duration_s is not None and not 0 < duration_s < inf:
        fail(f"--duration is {duration_s}: give a number of seconds above 0", EXIT_USAGE)
    if duration_s is not None and num_requests is None:
        if rate == inf:
            fail("--rate inf sends all at once, whatever the --duration: give --num-requests", EXIT_USAGE)
        if rate * duration_s > MOST_PLANNED:
            fail(f"--rate {rate:g} for {duration_s:g} s is more than {MOST_PLANNED:,} requests", EXIT_USAGE)
    if json_file is not None:
        was_there = json_file.exists()
        try:
            with json_file.open("a"):
                pass
            if not was_there:
                json_file.unlink()
        except OSError as error:
            why = f"--json: {json_file} cannot be written ({error.strerror})"
            fail(f"{why}; name a file in an existing folder", EXIT_USAGE)


def _lengths(flag: str, text: str) -> Lengths:
    """Raises ValueError that names the flag."""
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from error


async def _measure(address: str, load: Load, params: GenerateParams) -> Summary:
    async with quire.AsyncClient(address, connect_timeout_s=options.CONNECT_TIMEOUT_S, retries=0) as client:
        model = await client.model()
        planned = load.plan(model.vocab_size, model.eos_token_ids)
        _check_context(planned, model.max_model_len)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
            bar = progress.add_task(f"{load.rate:g} requests/s to {escape(model.name)}", total=len(planned))
            return await run_load(client, planned, params, lambda: progress.advance(bar))


def _check_context(planned: list[PlannedRequest], max_model_len: int) -> None:
    """Ends the command if random prompts and their outputs are longer than the model's context."""
    longest = max(
        (len(each.prompt) + each.max_tokens for each in planned if not isinstance(each.prompt, str)), default=0
    )
    if longest > max_model_len:
        why = f"--prompt-len and --output-len come to {longest:,} tokens, and the model's context is {max_model_len:,}"
        fail(f"{why}: give shorter ones", EXIT_USAGE)


async def run_load(
    client: quire.AsyncClient,
    planned: list[PlannedRequest],
    params: GenerateParams,
    on_end: Callable[[], None],
) -> Summary:
    """Sends every request when it is due, without waiting for any other.

    If it is cancelled, it cancels what runs and sums up what has ended.
    """
    measurements: list[Measurement] = []
    interrupted = False
    start_s = asyncio.get_running_loop().time()

    async def make(request: PlannedRequest) -> None:
        due_s = start_s + request.at_s
        await asyncio.sleep(max(0.0, due_s - asyncio.get_running_loop().time()))
        measurements.append(await _request(client, request, due_s, params))
        on_end()

    tasks = [asyncio.create_task(make(request)) for request in planned]
    try:
        await asyncio.gather(*tasks)
    except asyncio.CancelledError:
        interrupted = True
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    return summarize(measurements, asyncio.get_running_loop().time() - start_s, interrupted=interrupted)


async def _request(
    client: quire.AsyncClient, request: PlannedRequest, due_s: float, params: GenerateParams
) -> Measurement:
    clock = asyncio.get_running_loop().time
    first_s = last_s = None
    num_tokens = 0
    own: GenerateParams = {**params, "max_tokens": request.max_tokens, "seed": request.seed}
    try:
        async with client.stream(request.prompt, **own) as stream:
            async for chunk in stream:
                if chunk.num_tokens:
                    last_s = clock() - due_s
                    first_s = last_s if first_s is None else first_s
                    num_tokens += chunk.num_tokens
            completion = await stream.completion()
    except quire.QuireError as error:
        return Measurement(
            num_output_tokens=num_tokens,
            first_token_s=first_s,
            end_s=clock() - due_s,
            failure=type(error).__name__,
            reason=error_text(error),
        )
    return Measurement(
        num_prompt_tokens=completion.usage.prompt_tokens,
        num_output_tokens=num_tokens,
        num_samples=len(completion.samples),
        num_cached_tokens=completion.usage.cached_tokens,
        saving=completion.memory.saving,
        first_token_s=first_s,
        last_token_s=last_s,
        end_s=clock() - due_s,
    )


def report(summary: Summary) -> RenderableType:
    """The summary for a person."""
    totals = Table.grid(padding=(0, 2))
    totals.add_column(style="dim")
    ended = f"{summary.num_completed} of {summary.num_requests} in {summary.duration_s:.1f} s"
    totals.add_row("completed", f"{ended}, interrupted" if summary.interrupted else ended)
    totals.add_row("output", f"[bold]{summary.output_tokens_per_s:.1f} tokens/s[/bold]")
    totals.add_row("requests", f"{summary.requests_per_s:.2f}/s")
    totals.add_row("tokens", f"{summary.output_tokens} generated, {summary.prompt_tokens} in prompts")
    totals.add_row("prefix cache", f"{summary.cached_tokens} prompt tokens found")
    if summary.saving:
        totals.add_row("sharing", f"{summary.saving:.1%} of the blocks of a request saved, on average")
    for failure, count in summary.failures.items():
        kind = "refused" if failure == quire.OverloadedError.__name__ else "failed"
        totals.add_row(f"[red]{kind}[/red]", f"{count}, for example: {escape(summary.reasons[failure])}")
    return Group(totals, "", _latencies(summary)) if summary.num_completed else totals


def _latencies(summary: Summary) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("milliseconds")
    for name in ("p50", "p90", "p99", "mean"):
        table.add_column(name, justify="right")
    for name, values in (
        ("time to first token", summary.time_to_first_token_s),
        ("time per output token", summary.time_per_output_token_s),
        ("normalised latency, per token", summary.normalized_latency_s),
    ):
        if values is not None:
            shown = (values.p50, values.p90, values.p99, values.mean)
            table.add_row(name, *(f"{value * 1e3:.1f}" for value in shown))
    return table
