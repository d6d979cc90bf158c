"""Expected time until running groups free their seats, from the tokens that they still have to generate.

Groups that start together end together: no waiting group starts while they run, and then all start at once. The recent
rate of the queue does not show that; the running groups do. A group is expected to generate the part of its
`max_tokens` that ended groups have used, one token a step.

Pure: the caller gives the time. Knows no queue, no prompts and no memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from scheduler_svc.core.seat_use import SeatUse

STEP_WEIGHT = 0.1  # of the newest step, in a worker's seconds between steps
END_WEIGHT = 0.05  # of the newest end, in the part of max_tokens that is used
# A forecast takes up to 2 microseconds for each seat. Of few it is made as often as it is asked for after a step; of
# many it counts for so long that it takes 2 % of the time at most.
FEW_SEATS = 256
KEPT_S_A_SEAT = 100e-6


@dataclass(slots=True)
class _Pace:
    """Step times of one worker."""

    stepped_s: float  # when its latest step was planned
    between_s: float = 0.0  # steps while groups went on running; 0: not seen yet


class _Forecast(NamedTuple):
    """Use of all seats from now on."""

    num_free: int
    service_s: float  # of a group, from start to end, where that takes longest
    releases_s: list[float]  # when running groups will end, in order
    latest_s: list[float]  # when they will at the latest, with all of their max_tokens, in order; inf: not known
    most_service_s: float  # of the one with the most max_tokens


class SeatReleases:
    """One per engine. Planned steps and ends of groups are recorded; admission asks."""

    def __init__(self, seat_use: Callable[[], list[SeatUse]]) -> None:
        self._seat_use = seat_use
        self._paces: dict[str, _Pace] = {}
        self._used_part = 0.0  # of max_tokens; 0: nothing has ended yet
        self._output_tokens = 0.0  # of a group
        self._forecast: _Forecast | None = None  # None: to be made
        self._made_s = 0.0  # when it was
        self._is_outdated = False  # there was a step or an end since

    def record_step(self, now_s: float, worker_id: str, *, goes_on: bool) -> None:
        """Record a planned step of a worker. `goes_on`: it has a row of a sequence of the step before."""
        pace = self._paces.get(worker_id)
        if pace is None:
            self._paces[worker_id] = _Pace(now_s)
        else:
            between_s = now_s - pace.stepped_s
            if goes_on:
                pace.between_s += (between_s - pace.between_s) * (STEP_WEIGHT if pace.between_s else 1.0)
            pace.stepped_s = now_s
        self._is_outdated = True

    def record_end(self, num_output_tokens: int, max_tokens: int) -> None:
        """Record the end of a group, with the output tokens of its longest member."""
        weight = END_WEIGHT if self._used_part else 1.0
        self._used_part += (num_output_tokens / max_tokens - self._used_part) * weight
        self._output_tokens += (num_output_tokens - self._output_tokens) * weight
        self._is_outdated = True

    def forget_forecast(self) -> None:
        """Make the next forecast anew: the workers are others than those of the last step."""
        self._forecast = None

    def expected_s(self, now_s: float, num_ahead: int) -> float:
        """Least number of seconds until a seat is free for a group with so many ahead of it; 0 if unknown."""
        forecast = self._present_forecast(now_s)
        place = num_ahead - forecast.num_free
        if place < 0 or not forecast.releases_s:
            return 0.0
        rounds, place = divmod(place, len(forecast.releases_s))
        return max(0.0, forecast.releases_s[place] - now_s) + rounds * forecast.service_s

    def latest_s(self, now_s: float, num_ahead: int) -> float:
        """Most seconds until a seat is free for a group with so many ahead of it, if all are as long as those that run.

        inf if it is not known, or not the seats are what groups wait for.
        """
        forecast = self._present_forecast(now_s)
        if forecast.num_free > 0 or not forecast.latest_s:
            return inf
        rounds, place = divmod(num_ahead - forecast.num_free, len(forecast.latest_s))
        return max(0.0, forecast.latest_s[place] - now_s) + rounds * forecast.most_service_s

    def _present_forecast(self, now_s: float) -> _Forecast:
        if self._forecast is None or (self._is_outdated and now_s - self._made_s >= _kept_s(self._forecast)):
            self._forecast, self._made_s, self._is_outdated = self._make_forecast(), now_s, False
        return self._forecast

    def _make_forecast(self) -> _Forecast:
        """Forecast when seats become free. Free seats go to the groups ahead, each for a whole service."""
        num_free, longest_s = 0, 0.0
        releases_s: list[float] = []
        latest_s: list[float] = []
        most_service_s = 0.0
        seat_use = self._seat_use()
        for gone in self._paces.keys() - {use.worker_id for use in seat_use}:
            del self._paces[gone]
        for use in seat_use:
            num_free += use.num_free
            pace = self._paces.get(use.worker_id, _Pace(0.0))
            service_s = self._output_tokens * pace.between_s
            longest_s = max(longest_s, service_s)
            releases_s += [pace.stepped_s + service_s] * use.num_free
            for group in use.groups:
                num_left = max(0.0, group.max_tokens * self._used_part - group.num_output_tokens)
                releases_s.append(pace.stepped_s + num_left * pace.between_s)
                most_left = group.max_tokens - group.num_output_tokens
                latest_s.append(pace.stepped_s + most_left * pace.between_s if pace.between_s else inf)
                most_service_s = max(most_service_s, group.max_tokens * pace.between_s)
        return _Forecast(num_free, longest_s, sorted(releases_s), sorted(latest_s), most_service_s)


def _kept_s(forecast: _Forecast) -> float:
    """Seconds for which a forecast counts, though there was a step since."""
    num_seats = len(forecast.releases_s)
    return num_seats * KEPT_S_A_SEAT if num_seats > FEW_SEATS else 0.0
