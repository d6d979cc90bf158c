"""Signals that stop `quire serve`: every one that would otherwise kill it at once."""

import asyncio
import signal

# Besides the usual ones: signals that would end the process and leave its services behind.
_NAMES = ("SIGINT", "SIGTERM", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGVTALRM", "SIGPROF", "SIGXCPU", "SIGIO")


def set_on_stop_signals(stop: asyncio.Event) -> None:
    """Set `stop` at each signal, but at SIGHUP only once.

    SIGHUP stays ignored where our parent process ignores it, as nohup does.
    """
    loop = asyncio.get_running_loop()
    is_told = False

    def tell() -> None:
        nonlocal is_told
        is_told = True
        stop.set()

    def hang_up() -> None:
        """Ignore a second SIGHUP: the kernel and the shell both send one when a terminal is closed."""
        if not is_told:
            tell()

    for name in _NAMES:
        loop.add_signal_handler(getattr(signal, name), tell)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, hang_up)
