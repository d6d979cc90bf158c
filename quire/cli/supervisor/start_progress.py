"""Shows the progress of a start: on a terminal a live line, elsewhere a line for each phase.

Receives the services' reports until the greeting; later reports are only in their logs.
"""

import asyncio
from typing import Any

from quire.cli.supervisor.announcer import Announcer
from quire.cli.supervisor.start_view import StartView

REFRESH_S = 0.2
_IN_MEMORY = "NOT DURABLE: the journal is in memory"  # a warning that the greeting repeats anyway


class StartProgress:
    """Shows one start, until `close`."""

    def __init__(self, announcer: Announcer) -> None:
        self.view = StartView()
        self._announcer = announcer
        self._is_open = True
        self._since_s = asyncio.get_running_loop().time()
        self._said: set[str] = set()

    def handle_report(self, name: str, said: dict[str, Any]) -> None:
        """Handle a report of a service, as `common.status` writes it."""
        if not self._is_open:
            return
        if said.get("started"):
            self.view.begin_service(name)
        elif isinstance(phase := said.get("phase"), str):
            part = said.get("part")
            self._phase(name, phase, part if isinstance(part, int | float) else None)
        elif isinstance(notice := said.get("notice"), str):
            self.view.add_notice(name, str(said.get("about", "")), notice)
        elif isinstance(warning := said.get("warning"), str):
            self._warning(name, warning, said.get("reason"))

    async def show(self) -> None:
        """Update the live line until `close`."""
        while self._is_open:
            self._announcer.show_live_line(self.view.line(self._elapsed_s()))
            await asyncio.sleep(REFRESH_S)

    def close(self) -> None:
        """Remove the live line, and ignore later reports."""
        self._is_open = False
        self._announcer.show_live_line("")

    def _phase(self, name: str, phase: str, part: float | None) -> None:
        changed = self.view.set_phase(name, phase, part)
        if changed is not None and not self._announcer.has_live_line:
            self._announcer.print_message(f"{self._elapsed_s():.1f} s: {name} {changed}")

    def _warning(self, name: str, warning: str, reason: object) -> None:
        """Keep lasting warnings for the greeting; print at once those that explain why it is not there yet."""
        text = warning if reason is None else f"{warning}: {reason}"
        is_scheduler = name.startswith("scheduler")
        if (is_scheduler and reason is not None) or self.view.is_ready(name):
            if text not in self._said:
                self._said.add(text)
                self._announcer.print_message(f"{name}: {text}")
        elif not warning.startswith(_IN_MEMORY):
            self.view.add_warning(name, text)

    def _elapsed_s(self) -> float:
        return asyncio.get_running_loop().time() - self._since_s
