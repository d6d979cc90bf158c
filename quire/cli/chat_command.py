"""`quire chat`: a conversation in the terminal, or one message and its answer."""

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

import typer
from rich.markup import escape

import quire
from quire.cli import options
from quire.cli.output import err, error_text, errors_explained, out, write_answer
from quire.cli.wait_hint import WaitHint
from quire.params import DEFAULT_ADDRESS, GenerateParams, Tools

with contextlib.suppress(ImportError):
    import readline  # noqa: F401 - gives input() line editing and history, where Python has it

T = TypeVar("T")

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
    tools: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File with tools that the model may call: a JSON array as for OpenAI's API."),
    ] = None,
    template_kwargs: Annotated[
        str | None, typer.Option(help="JSON object of further variables for the chat template.")
    ] = None,
) -> None:
    """Chat with the model. Calls of tools are printed, each as a name and its arguments."""
    first = [] if system is None else [quire.ChatMessage("system", system)]
    with errors_explained(), quire.Client(address, connect_timeout_s=options.CONNECT_TIMEOUT_S) as client:
        speaker = Speaker(
            client,
            tools=None if tools is None else _json("--tools", options.file_text("--tools", tools), list),
            template_kwargs=None if template_kwargs is None else _json("--template-kwargs", template_kwargs, dict),
            params=options.given_params(context),
        )
        if message is not None:
            speaker.answer([*first, quire.ChatMessage("user", message)])
        elif not converse(speaker, first):
            raise typer.Exit(1)


class Speaker:
    """The model, with what all its answers share."""

    def __init__(
        self,
        client: quire.Client,
        *,
        tools: Tools | None,
        template_kwargs: Mapping[str, Any] | None,
        params: GenerateParams,
    ) -> None:
        self._client = client
        self._tools = tools
        self._template_kwargs = template_kwargs
        self._params = params
        model = client.model()
        self.name = model.name
        self._format = model.answer_format

    def answer(self, history: Sequence[quire.ChatMessage]) -> quire.ChatMessage:
        """Prints the answer as it streams. Returns all of it."""
        stream = self._client.stream_chat(
            history,
            tools=self._tools,
            template_kwargs=self._template_kwargs,
            answer_format=self._format,
            **self._params,
        )
        with stream, WaitHint(self._client, stream.request_id) as hint:
            write_answer(stream, hint.stop)
            message = stream.completion().message
        assert message is not None, "it is parsed"
        return message


def converse(speaker: Speaker, first: list[quire.ChatMessage]) -> bool:
    """Reads messages and prints answers until the input ends. Only a person is prompted, no file or pipe.

    False if a message of a file or pipe had no answer.
    """
    is_typed = sys.stdin.isatty()
    if is_typed:
        out.print(f"[bold]{escape(speaker.name)}[/bold] [dim]{HELP}[/dim]")
    history = list(first)
    has_failed = False
    while True:
        try:
            said = input(_prompt() if is_typed else "").strip()
        except EOFError:
            if is_typed:
                out.print()
            break
        except KeyboardInterrupt:
            if not is_typed:
                raise
            out.print(f"\n[dim]{HELP}[/dim]")
            continue
        if said == "/exit":
            break
        if said == "/reset":
            history = list(first)
        elif said:
            asked = [*history, quire.ChatMessage("user", said)]
            answer = _turn(speaker, asked, is_typed=is_typed)
            if answer is not None:
                history = [*asked, answer]
            has_failed = has_failed or answer is None
    return is_typed or not has_failed


def _prompt() -> str:
    return PROMPT if out.is_terminal else "> "


def _turn(speaker: Speaker, asked: list[quire.ChatMessage], *, is_typed: bool) -> quire.ChatMessage | None:
    """Answers the last message. None if that fails, or if a person stops it by Ctrl-C."""
    try:
        return speaker.answer(asked)
    except KeyboardInterrupt:
        if not is_typed:
            raise
    except quire.QuireError as error:
        err.print(f"quire: {error_text(error)}", markup=False)
    return None


def _json(flag: str, text: str, kind: type[T]) -> T:
    """The value of a flag with JSON. Raises ValueError for other text, or JSON of another kind."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{flag} is no JSON: {error}") from None
    if not isinstance(value, kind):
        raise ValueError(f"{flag} is no JSON {'array' if kind is list else 'object'}: give one")
    return value
