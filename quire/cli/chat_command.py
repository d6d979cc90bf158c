"""`quire chat`: a conversation in the terminal, or one message and its answer."""

import contextlib
import sys
from typing import Annotated

import typer

import quire
from quire.cli import options
from quire.cli.output import err, errors_explained, out, write_stream
from quire.cli.wait_hint import WaitHint
from quire.params import DEFAULT_ADDRESS, GenerateParams

with contextlib.suppress(ImportError):
    import readline  # noqa: F401 - gives input() line editing and history, where Python has it

HELP = "Ctrl-D or /exit quits, /reset clears the conversation, Ctrl-C stops an answer."
PROMPT = "\001\033[1;36m\002> \001\033[0m\002"  # characters between 1 and 2 take no room in the line


def chat(
    context: typer.Context,
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="Send only this message and print the answer.")
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message before the conversation.")] = None,
    address: options.Address = DEFAULT_ADDRESS,
    max_tokens: options.MaxTokens = None,
    temperature: options.Temperature = None,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    seed: options.Seed = None,
    json_schema: options.JsonSchema = None,
    json_object: options.JsonObject = False,
    regex: options.Regex = None,
    choice: options.Choice = None,
    timeout_s: options.TimeoutS = None,
) -> None:
    """Chat with the model."""
    params = options.given_params(context)
    first = [] if system is None else [quire.ChatMessage("system", system)]
    with errors_explained(), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        if message is not None:
            answer(client, [*first, quire.ChatMessage("user", message)], params)
        else:
            converse(client, first, params)


def converse(client: quire.Client, first: list[quire.ChatMessage], params: GenerateParams) -> None:
    """Reads messages and prints answers until the input ends."""
    out.print(f"[bold]{client.model().name}[/bold] [dim]{HELP}[/dim]")
    history = list(first)
    while True:
        try:
            said = input(PROMPT if out.is_terminal else "> ").strip()
        except EOFError:
            out.print()
            return
        except KeyboardInterrupt:
            if not sys.stdin.isatty():
                raise
            out.print(f"\n[dim]{HELP}[/dim]")
            continue
        if said == "/exit":
            return
        if said == "/reset":
            history = list(first)
        elif said:
            history.append(quire.ChatMessage("user", said))
            history = _turn(client, history, params)


def _turn(client: quire.Client, history: list[quire.ChatMessage], params: GenerateParams) -> list[quire.ChatMessage]:
    """Answers one message. A turn that fails or is stopped is dropped from the history."""
    try:
        text = answer(client, history, params)
    except KeyboardInterrupt:
        return history[:-1]
    except quire.QuireError as error:
        err.print(f"quire: {error.message}", markup=False)
        return history[:-1]
    return [*history, quire.ChatMessage("assistant", text)]


def answer(client: quire.Client, history: list[quire.ChatMessage], params: GenerateParams) -> str:
    """Prints the answer as it streams. Returns all of it."""
    with client.stream_chat(history, **params) as stream, WaitHint(client, stream.request_id) as hint:
        write_stream(stream, hint.stop)
        return stream.completion().text
