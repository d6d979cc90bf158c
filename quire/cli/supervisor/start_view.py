"""The progress of each service's start as text: its phase, warnings, notices, and the seconds since the start.

Built only from the services' reports; knows no process and no terminal.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

# Phases of the services, and the text shown for each; other phases are shown as they are.
PHASES = {
    "checkpoint": "checking",
    "compiling": "compiling kernels (only the first time)",
    "kernels": "preparing kernels",
    "weights": "loading",
    **dict.fromkeys(("kv_pool", "warm_up", "graphs", "profile", "attention", "huge_pages"), "measuring"),
}
READY = "ready"


@dataclass(slots=True)
class _Service:
    phase: str = "starting"
    part: float | None = None
    warnings: dict[str, None] = field(default_factory=dict)  # each once, in order
    notices: dict[str, str] = field(default_factory=dict)


class StartView:
    """The services of one start, in order of their first report."""

    def __init__(self) -> None:
        self._services: dict[str, _Service] = {}

    def begin_service(self, name: str) -> None:
        """Reset a service that is started or restarted."""
        self._services[name] = _Service()

    def set_phase(self, name: str, phase: str, part: float | None = None) -> str | None:
        """Set the phase of a service. Returns its text if it changed."""
        service = self._services.setdefault(name, _Service())
        shown = PHASES.get(phase, phase)
        is_new = shown != service.phase
        service.phase, service.part = shown, part
        return shown if is_new else None

    def add_warning(self, name: str, warning: str) -> None:
        """Add a warning for the greeting."""
        self._services.setdefault(name, _Service()).warnings[warning] = None

    def add_notice(self, name: str, about: str, notice: str) -> None:
        """Add a notice for the greeting, such as a choice and its reason."""
        self._services.setdefault(name, _Service()).notices[about] = notice

    def remove_service(self, name: str) -> None:
        """Remove a service."""
        self._services.pop(name, None)

    def is_ready(self, name: str) -> bool:
        return name in self._services and self._services[name].phase == READY

    def line(self, elapsed_s: float) -> str:
        """One line for the services; those that are ready come last."""
        parts = []
        for name, service in sorted(self._services.items(), key=lambda each: each[1].phase == READY):
            percent = f" {service.part:.0%}" if service.part is not None else ""
            parts.append(f"{name} {service.phase}{percent}")
        return f"{elapsed_s:.0f} s: {', '.join(parts)}"

    def warnings(self) -> list[str]:
        """Each warning once, with the services that gave it, unless all workers did."""
        return self._told((name, text) for name, service in self._services.items() for text in service.warnings)

    def notices(self) -> list[tuple[str, str]]:
        """Each notice once, as the warnings, with its subject."""
        given: dict[str, list[tuple[str, str]]] = {}
        for name, service in self._services.items():
            for about, text in service.notices.items():
                given.setdefault(about, []).append((name, text))
        return [(about, text) for about, texts in given.items() for text in self._told(texts)]

    def _told(self, texts: Iterable[tuple[str, str]]) -> list[str]:
        """Each text once, by the names of the services that gave it."""
        said: dict[str, list[str]] = {}
        for name, text in texts:
            said.setdefault(text, []).append(name)
        workers = [name for name in self._services if name.startswith("worker")]
        everybody = (workers, ["scheduler"])
        return [text if names in everybody else f"{', '.join(names)}: {text}" for text, names in said.items()]
