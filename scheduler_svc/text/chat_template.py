"""Renders a conversation with the model's own chat template, as the template's authors expect of it.

The template is a program that came with the model: it runs in a sandbox in a process of its own, within limits, and
whatever goes wrong in it is a refusal of the chat, never a failure of the scheduler. It knows no tokens.
"""

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from common.native_faults import shortened
from quire.errors import FailedPreconditionError, FieldViolation, InvalidRequestError
from scheduler_svc.text import template_program
from scheduler_svc.text.limited_process import ProcessEndedError
from scheduler_svc.text.template_process import TemplateProcess

MAX_EXCESSES = 3  # in a row; then the template is not tried with chats as long as one of those
REST_S = 30.0  # for so long


class _Size(NamedTuple):
    """Size of a chat."""

    num_messages: int
    num_chars: int

    def covers(self, other: "_Size") -> bool:
        return self.num_messages >= other.num_messages and self.num_chars >= other.num_chars


class ChatTemplate:
    """Template, compiled when it is first used. Any thread may render, each in a process of its own."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        self._source = source
        self._special_tokens = dict(special_tokens)
        self._idle: list[TemplateProcess] = []
        self._lock = threading.Lock()
        self._excesses: tuple[_Size, ...] = ()  # in a row
        self._resting: tuple[_Size, ...] = ()  # what is not tried now
        self._rests_until_s = 0.0
        weakref.finalize(self, _kill_all, self._idle)

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> str:
        """Text of the conversation, special tokens included.

        Raises:
            InvalidRequestError: The template refused the messages; its own message is passed on.
            FailedPreconditionError: The template is broken, or goes beyond its limits.
        """
        size = _Size(len(messages), sum(len(text) for each in messages for text in each.values()))
        if time.monotonic() < self._rests_until_s and any(size.covers(each) for each in self._resting):
            raise _beyond_limits()
        try:
            with self._lock:
                process = self._idle.pop() if self._idle else None
            process = process or TemplateProcess(self._source, self._special_tokens)
            kind, rest = process.ask(messages, add_generation_prompt=add_generation_prompt)
        except ProcessEndedError:
            self._note_excess(size)
            raise _beyond_limits() from None
        with self._lock:
            self._idle.append(process)
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
        description = f"the model's chat template refuses them: {shortened(Exception(said))}"
        raise InvalidRequestError.of([FieldViolation("chat.messages", description)])

    def _note_excess(self, size: _Size) -> None:
        """Record a chat beyond the limits: each costs seconds of a core, so after some in a row such chats are refused.

        Shorter chats are not: else a few long ones of one client would stop everybody's.
        """
        self._excesses += (size,)
        if len(self._excesses) >= MAX_EXCESSES:
            self._resting, self._excesses = self._excesses, ()
            self._rests_until_s = time.monotonic() + REST_S


def _kill_all(processes: list[TemplateProcess]) -> None:
    for process in processes:
        process.kill()


def _beyond_limits() -> FailedPreconditionError:
    return FailedPreconditionError(
        f"the model's chat template takes more than {template_program.MAX_CPU_S} s, "
        f"{template_program.MAX_MEMORY_BYTES >> 20} MiB or {template_program.MAX_OUTPUT_CHARS:,} characters for this "
        "chat: shorten it, or send the prompt as text"
    )
