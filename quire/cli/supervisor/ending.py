"""What tells `quire serve` to end: every signal that would otherwise end it where it stands."""

import asyncio
import signal

# Beside those that a person or a supervisor of ours sends: what would end the process, with its services left behind.
_NAMES = ("SIGINT", "SIGTERM", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGXCPU", "SIGIO")


def end_on_signals(stop: asyncio.Event) -> None:
    """Sets `stop` on each signal; again on each that follows, except that a terminal is closed once.

    A hang-up that whoever started us had us ignore, as nohup does, is ignored.
    """
    loop = asyncio.get_running_loop()
    is_told = False

    def tell() -> None:
        nonlocal is_told
        is_told = True
        stop.set()

    def hang_up() -> None:
        """The kernel and a shell both say it, and it is no sign of impatience."""
        if not is_told:
            tell()

    for name in _NAMES:
        loop.add_signal_handler(getattr(signal, name), tell)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, hang_up)
