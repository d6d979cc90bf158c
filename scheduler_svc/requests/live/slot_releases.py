"""How long until running groups leave slots to newcomers, from what they have still to put out.

Groups that were begun together end together: nobody is served for as long as they run, and then all who wait at
once. How fast the queue was left lately does not show that; what runs does. A group is expected to put out the part
of its `max_tokens` that ended ones have used, a token a step.

Pure: it is told the time. It knows no queue, and neither prompts nor memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

from scheduler_svc.core.slot_use import SlotUse

STEP_WEIGHT = 0.1  # of the newest step, in a worker's seconds between steps
END_WEIGHT = 0.05  # of the newest end, in the part of max_tokens that is used


@dataclass(slots=True)
class _Pace:
    """Of one worker."""

    stepped_s: float  # when its latest step was planned
    between_s: float = 0.0  # steps while groups went on running; 0: not seen yet


class SlotReleases:
    """Told of each step that is planned, and of each group's end; asked at the door."""

    def __init__(self, slot_use: Callable[[], list[SlotUse]]) -> None:
        self._slot_use = slot_use
        self._paces: dict[str, _Pace] = {}
        self._used_part = 0.0  # of max_tokens; 0: nothing has ended yet
        self._output_tokens = 0.0  # of a group
        self._num_free = 0
        self._service_s = 0.0  # of a group, from start to end
        self._releases_s: list[float] | None = None  # when running groups will end, in order; None: to be found

    def record_step(self, now_s: float, worker_id: str, *, goes_on: bool) -> None:
        """A step of a worker has been planned; `goes_on`: with a row of who was in the step before."""
        pace = self._paces.get(worker_id)
        if pace is None:
            self._paces[worker_id] = _Pace(now_s)
        else:
            between_s = now_s - pace.stepped_s
            if goes_on:
                pace.between_s += (between_s - pace.between_s) * (STEP_WEIGHT if pace.between_s else 1.0)
            pace.stepped_s = now_s
        self._releases_s = None

    def record_end(self, num_output_tokens: int, max_tokens: int) -> None:
        """A group has ended, with so many output tokens of its longest member."""
        weight = END_WEIGHT if self._used_part else 1.0
        self._used_part += (num_output_tokens / max_tokens - self._used_part) * weight
        self._output_tokens += (num_output_tokens - self._output_tokens) * weight
        self._releases_s = None

    def expected_s(self, now_s: float, num_ahead: int) -> float:
        """Seconds until a slot is free for a group with so many ahead of it, at least; 0 if nothing is known of it."""
        if self._releases_s is None:
            self._find()
        assert self._releases_s is not None
        place = num_ahead - self._num_free
        if place < 0 or not self._releases_s:
            return 0.0
        rounds, place = divmod(place, len(self._releases_s))
        return max(0.0, self._releases_s[place] - now_s) + rounds * self._service_s

    def _find(self) -> None:
        """Free slots are those ahead's, for a whole service each."""
        self._num_free, self._service_s, self._releases_s = 0, 0.0, []
        slot_use = self._slot_use()
        for gone in self._paces.keys() - {use.worker_id for use in slot_use}:
            del self._paces[gone]
        for use in slot_use:
            self._num_free += use.num_free
            pace = self._paces.get(use.worker_id, _Pace(0.0))
            service_s = self._output_tokens * pace.between_s
            self._service_s = max(self._service_s, service_s)
            self._releases_s += [pace.stepped_s + service_s] * use.num_free
            for group in use.groups:
                num_left = max(0.0, group.max_tokens * self._used_part - group.num_output_tokens)
                self._releases_s.append(pace.stepped_s + num_left * pace.between_s)
        self._releases_s.sort()
