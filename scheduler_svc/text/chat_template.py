"""Renders a conversation with the model's own chat template, as the template's authors expect of it.

The template is a program that came with the model: it runs in a sandbox in a process of its own, within limits, and
whatever goes wrong in it is a refusal of the chat, never a failure of the scheduler. It knows no tokens.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from common.native_faults import shortened
from common.violations import refusal_of
from quire.errors import FailedPreconditionError
from scheduler_svc.text import template_program
from scheduler_svc.text.limited_process import IdleProcesses, LimitedProcess, ProcessEndedError

MAX_EXCESSES = 3  # in a row; then the template is not tried with chats as long as one of those
REST_S = 30.0  # for so long
# For one conversation, the start of its process included. Only a process that hangs meets it, since CPU time has a
# limit of its own: with ten busy processes for each core a usual chat takes more than 5 s.
MAX_WALL_S = 15.0 * template_program.MAX_CPU_S

_MAX_ANSWER_BYTES = 4 * template_program.MAX_OUTPUT_CHARS + 4096
_PROGRAM = Path(template_program.__file__)


class _Size(NamedTuple):
    """Size of a chat."""

    num_messages: int
    num_bytes: int

    def covers(self, other: "_Size") -> bool:
        return self.num_messages >= other.num_messages and self.num_bytes >= other.num_bytes


class ChatTemplate:
    """Template, compiled when it is first used. Any thread may render, each in a process of its own."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._template = json.dumps({"source": source, "special_tokens": dict(special_tokens)}).encode()
        self._idle = IdleProcesses()
        self._excesses: tuple[_Size, ...] = ()  # in a row
        self._resting: tuple[_Size, ...] = ()  # what is not tried now
        self._rests_until_s = 0.0

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        tools: str = "",
        template_kwargs: str = "",
    ) -> str:
        """Text of the conversation, special tokens included; it may end behind the content of the final message.

        Args:
            messages: with the keys that templates know; arguments of calls are JSON.
            add_generation_prompt: opens the assistant's turn.
            continue_final_message: the text ends behind the content of the final message.
            tools: JSON array of objects; empty for none.
            template_kwargs: JSON object of further variables; empty for none.

        Raises:
            InvalidRequestError: The template refused the messages, and its own message is passed on; or tools or
                template_kwargs are something else.
            FailedPreconditionError: The template is broken, or goes beyond its limits.
        """
        chat = {
            "messages": [dict(each) for each in messages],
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "tools": tools,
            "template_kwargs": template_kwargs,
        }
        data = json.dumps(chat).encode()
        size = _Size(len(messages), len(data))
        if time.monotonic() < self._rests_until_s and any(size.covers(each) for each in self._resting):
            raise _beyond_limits()
        try:
            kind, rest = self._ask(data)
        except ProcessEndedError:
            self._note_excess(size)
            raise _beyond_limits() from None
        if kind == template_program.BEYOND_LIMITS:
            self._note_excess(size)
            raise _beyond_limits()
        self._excesses = ()
        said = rest.decode("utf-8", "surrogatepass")
        if kind == template_program.TEXT:
            return said
        if kind == template_program.BROKEN:
            raise FailedPreconditionError(
                f"the model's chat template is not valid Jinja ({shortened(Exception(said))}): send the prompt as text"
            )
        if kind == template_program.NO_JSON:
            field, _, reason = said.partition(" ")
            raise refusal_of(f"chat.{field}", reason)
        raise refusal_of("chat.messages", f"the model's chat template refuses them: {shortened(Exception(said))}")

    def _ask(self, chat: bytes) -> tuple[bytes, bytes]:
        """Kind of the answer, one of those of `template_program`, and its content. Raises ProcessEndedError."""
        process = self._idle.take() or LimitedProcess(_PROGRAM, self._template)
        answer = process.ask(chat, wall_s=MAX_WALL_S, most_bytes=_MAX_ANSWER_BYTES)
        self._idle.put_back(process)
        return answer

    def _note_excess(self, size: _Size) -> None:
        """Record a chat beyond the limits: each costs seconds of a core, so after some in a row such chats are refused.

        Shorter chats are not: else a few long ones of one client would stop everybody's.
        """
        self._excesses += (size,)
        if len(self._excesses) >= MAX_EXCESSES:
            self._resting, self._excesses = self._excesses, ()
            self._rests_until_s = time.monotonic() + REST_S


def _beyond_limits() -> FailedPreconditionError:
    return FailedPreconditionError(
        f"the model's chat template takes more than {template_program.MAX_CPU_S} s, "
        f"{template_program.MAX_MEMORY_BYTES >> 20} MiB or {template_program.MAX_OUTPUT_CHARS:,} characters for this "
        "chat: shorten it, or send the prompt as text"
    )
