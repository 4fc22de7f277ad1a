"""Figures of the service in the text format of Prometheus."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jitkern.service.builds import Outcome

_PREFIX = "jitkern_serve"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 180, 600)
_OF_CACHE = ("index", "bundle")  # routes
_KERNELS = ("bundle", "build", "outcome")  # routes
_ANSWERED = ("200", "304", "409", "422")


class Metrics:
    """The metrics of one server, in a separate registry.

    requests: returns how many requests there are now. builds: the same of the builds that run, if
    its argument is True, or of those that wait.
    """

    def __init__(self, requests: Callable[[], int], builds: Callable[[bool], int]) -> None:
        self._registry = CollectorRegistry()
        of: Any = {"namespace": _PREFIX, "registry": self._registry}
        self._requests = Counter("requests", "Requests.", ["route", "status"], **of)
        self._hits = Counter("hits", "GET requests that hit.", **of)
        self._misses = Counter("misses", "GET requests that missed.", **of)
        self._sent = Counter("sent_bytes", "Bytes of answers.", **of)
        self._builds = Counter("builds", "Builds.", ["status"], **of)
        self._entries = Counter("built_entries", "Entries built.", **of)
        self._seconds = Histogram("build_seconds", "Seconds of builds.", buckets=_SECONDS, **of)
        Gauge("in_flight", "Requests now.", **of).set_function(requests)
        Gauge("builds_running", "Builds now.", **of).set_function(lambda: builds(True))
        Gauge("queue", "Builds that wait.", **of).set_function(lambda: builds(False))

    def answered(self, route: str, status: int, sent: int) -> None:
        """Count an answer."""
        self._requests.labels(route, str(status)).inc()
        self._sent.inc(sent)
        if route in _OF_CACHE:
            (self._misses if status == 404 else self._hits).inc()

    def built(self, outcome: Outcome, seconds: float) -> None:
        """Count a build."""
        self._builds.labels(str(outcome.status)).inc()
        self._entries.inc(outcome.built)
        self._seconds.observe(seconds)

    def served(self) -> tuple[int, int]:
        """Return how many requests for kernels were answered, and how many builds that took."""
        value = self._registry.get_sample_value
        answers = [
            value(f"{_PREFIX}_requests_total", {"route": route, "status": status})
            for route, status in itertools.product(_KERNELS, _ANSWERED)
        ]
        return int(sum(filter(None, answers))), int(value(f"{_PREFIX}_build_seconds_count") or 0)

    def text(self) -> bytes:
        """Return all figures, as CONTENT_TYPE_LATEST."""
        return generate_latest(self._registry)
