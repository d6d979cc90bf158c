"""A tokenizer's trial, and the processes that encode with one whose time may be out of proportion to its text.

Reading a tokenizer.json keeps the whole interpreter, and a regular expression in it may keep a thread for hours: so it
is read in a process of its own first, within limits, and only one that passed is read here. It knows no worker.
"""

from array import array
from pathlib import Path

from common.native_faults import shortened
from scheduler_svc.text import tokenizer_program
from scheduler_svc.text.limited_process import IdleProcesses, LimitedProcess, ProcessEndedError

TRIAL_CPU_S = 10.0  # a tokenizer.json of 15 MB takes 1 to 2 s
_WALL_PER_CPU = 4  # on a machine however busy
_MOST_ANSWER_BYTES = 256 << 20
_MOST_IDLE = 2  # processes, each with a whole tokenizer
_PROGRAM = Path(tokenizer_program.__file__)


class TextRefusedError(Exception):
    """The tokenizer refuses a text, in its own words, or takes too long for it."""


class TokenizerProcesses:
    """Encodes texts, each in a process that can be killed. Any thread may call it."""

    def __init__(self, tokenizer_json: bytes, *, trial_cpu_s: float = TRIAL_CPU_S) -> None:
        self._tokenizer_json = tokenizer_json
        self._trial_cpu_s = trial_cpu_s
        self.read_s = 0.0  # how long the trial took to read it
        self._idle = IdleProcesses(_MOST_IDLE)

    def try_out(self) -> bool:
        """True if its time is in proportion to the text: it needs no process then. Raises ValueError if it failed."""
        process, is_usual, self.read_s = self._start()
        if is_usual:
            process.kill()
        else:
            self._idle.put_back(process)
        return is_usual

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text. Raises TextRefusedError, UnicodeEncodeError, or ValueError as `try_out`."""
        data = text.encode()
        cpu_s = tokenizer_program.MAX_TEXT_CPU_S + len(text) * tokenizer_program.MAX_CPU_S_PER_CHAR
        kind = tokenizer_program.ENCODE if add_special_tokens else tokenizer_program.ENCODE_PLAIN
        try:
            process = self._idle.take() or self._start()[0]
            answer, said = process.ask(kind + data, wall_s=_WALL_PER_CPU * (cpu_s + 1), most_bytes=_MOST_ANSWER_BYTES)
        except ProcessEndedError:
            most = f"{cpu_s:.1f} s or {tokenizer_program.MAX_MEMORY_BYTES >> 30} GiB"
            raise TextRefusedError(f"it takes more than {most} for this text: shorten or change it") from None
        self._idle.put_back(process)
        if answer == tokenizer_program.REFUSED:
            raise TextRefusedError(shortened(Exception(said.decode())))
        return array("I", said).tolist()

    def _start(self) -> tuple[LimitedProcess, bool, float]:
        """A process that has read and tried the tokenizer, whether that is a usual one, and how long reading took."""
        try:
            process = LimitedProcess(_PROGRAM, self._tokenizer_json, {"TOKENIZERS_PARALLELISM": "false"})
            request = tokenizer_program.TRIAL + str(self._trial_cpu_s).encode()
            kind, said = process.ask(request, wall_s=_WALL_PER_CPU * self._trial_cpu_s, most_bytes=65_536)
        except ProcessEndedError:
            raise ValueError(
                f"the model's tokenizer.json takes more than {self._trial_cpu_s:g} s or "
                f"{tokenizer_program.MAX_MEMORY_BYTES >> 30} GiB to be read and tried: check the model folder"
            ) from None
        if kind == tokenizer_program.REFUSED:
            process.kill()
            raise ValueError(f"the model's tokenizer.json cannot be read: {shortened(Exception(said.decode()))}")
        return process, kind == tokenizer_program.USUAL, float(said)
