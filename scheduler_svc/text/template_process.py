"""Handle of the process in which a model's chat template runs. Knows the messages, not the limits."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from scheduler_svc.text.limited_process import LimitedProcess
from scheduler_svc.text.template_program import MAX_OUTPUT_CHARS

MAX_WALL_S = 5.0  # for one conversation, on a machine however busy; its CPU time has a limit of its own
_MAX_ANSWER_BYTES = 4 * MAX_OUTPUT_CHARS + 4096
_PROGRAM = Path(__file__).with_name("template_program.py")


class TemplateProcess:
    """One template. `ask` is called by one thread at a time; after ProcessEndedError it is over."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        template = {"source": source, "special_tokens": dict(special_tokens)}
        self._process = LimitedProcess(_PROGRAM, json.dumps(template).encode())

    def ask(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> tuple[bytes, bytes]:
        """Kind of the answer, one of those of `template_program`, and its content.

        Raises ProcessEndedError.
        """
        chat = {"messages": [dict(each) for each in messages], "add_generation_prompt": add_generation_prompt}
        return self._process.ask(json.dumps(chat).encode(), wall_s=MAX_WALL_S, most_bytes=_MAX_ANSWER_BYTES)

    def kill(self) -> None:
        """Ends it; again is harmless."""
        self._process.kill()
