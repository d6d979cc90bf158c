"""The process in which a model's chat template runs, from outside: started, asked, killed when it takes too long."""

import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from scheduler_svc.text.template_program import LENGTH, MAX_OUTPUT_CHARS

MAX_WALL_S = 5.0  # for one conversation, on a machine however busy; its CPU time has a limit of its own
_MAX_ANSWER_BYTES = 4 * MAX_OUTPUT_CHARS + 4096
_PROGRAM = Path(__file__).with_name("template_program.py")


class TemplateEndedError(Exception):
    """The template's process has ended, or was killed, instead of answering."""


class TemplateProcess:
    """One template. `ask` is called by one thread at a time; after TemplateEndedError it is over."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        # Nothing of ours is in its environment, and `-I` keeps the working folder out of its imports.
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(_PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={},
        )
        self._send({"source": source, "special_tokens": dict(special_tokens)})

    def ask(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool) -> tuple[bytes, bytes]:
        """What kind of answer it is, one of those of `template_program`, and the rest of it.

        Raises TemplateEndedError.
        """
        until_s = time.monotonic() + MAX_WALL_S
        self._send({"messages": [dict(each) for each in messages], "add_generation_prompt": add_generation_prompt})
        (length,) = LENGTH.unpack(self._read(LENGTH.size, until_s))
        if not 1 <= length <= _MAX_ANSWER_BYTES:
            self.kill()
            raise TemplateEndedError
        answer = self._read(length, until_s)
        return answer[:1], answer[1:]

    def kill(self) -> None:
        """Ends it; again is harmless."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                with suppress(BrokenPipeError):  # what was not read is lost with it
                    pipe.close()

    def _send(self, message: Mapping[str, object]) -> None:
        data = json.dumps(message).encode()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(LENGTH.pack(len(data)) + data)
            self._process.stdin.flush()
        except OSError:
            self.kill()
            raise TemplateEndedError from None

    def _read(self, num_bytes: int, until_s: float) -> bytes:
        assert self._process.stdout is not None
        fd = self._process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        data = bytearray()
        while len(data) < num_bytes:
            left_s = until_s - time.monotonic()
            piece = b""
            if left_s > 0 and poll.poll(left_s * 1000):
                piece = os.read(fd, num_bytes - len(data))
            if not piece:
                self.kill()
                raise TemplateEndedError
            data += piece
        return bytes(data)
