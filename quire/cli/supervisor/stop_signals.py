"""Signals that stop `quire serve`: every one that would otherwise kill it at once."""

import asyncio
import signal

# Signals that end no process (Python ignores SIGPIPE and SIGXFSZ), that nobody can catch, and those of a fault, whose
# code would go on with it. All others would end the process and leave its services behind.
_LEFT_ALONE = (
    *("SIGCHLD", "SIGCONT", "SIGINFO", "SIGPIPE", "SIGTSTP", "SIGTTIN", "SIGTTOU", "SIGURG", "SIGWINCH", "SIGXFSZ"),
    *("SIGKILL", "SIGSTOP"),
    *("SIGBUS", "SIGEMT", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"),
)


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

    left_alone = {getattr(signal, name) for name in (*_LEFT_ALONE, "SIGHUP") if hasattr(signal, name)}
    for number in signal.valid_signals() - left_alone:
        loop.add_signal_handler(number, tell)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        loop.add_signal_handler(signal.SIGHUP, hang_up)
