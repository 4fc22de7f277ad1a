"""Figures of the service in the text format of Prometheus: `pip install "jitkern[serve]"`."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from jitkern.service.build import Outcome

REMEDY = 'pip install "jitkern[serve]"'
_PREFIX = "jitkern_serve"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 180, 600)
_OF_CACHE = ("index", "bundle")  # routes
_KERNELS = ("bundle", "build", "outcome")  # routes
_ANSWERED = ("200", "304", "409", "422")


class Metrics:
    """The metrics of one server, in a separate registry; none without prometheus-client.

    requests: returns how many requests there are now. builds: the same of the builds that run, if
    its argument is True, or of those that wait.
    """

    def __init__(self, requests: Callable[[], int], builds: Callable[[bool], int]) -> None:
        self._registry: Any = None
        try:
            import prometheus_client as client
        except ImportError:
            return
        self._registry = client.CollectorRegistry()
        self._text = client.generate_latest
        self.content_type: str = client.CONTENT_TYPE_LATEST
        of: Any = {"namespace": _PREFIX, "registry": self._registry}
        self._requests = client.Counter("requests", "Requests.", ["route", "status"], **of)
        self._hits = client.Counter("hits", "GET requests that hit.", **of)
        self._misses = client.Counter("misses", "GET requests that missed.", **of)
        self._sent = client.Counter("sent_bytes", "Bytes of answers.", **of)
        self._builds = client.Counter("builds", "Builds.", ["status"], **of)
        self._entries = client.Counter("built_entries", "Entries built.", **of)
        self._seconds = client.Histogram(
            "build_seconds", "Seconds of builds.", buckets=_SECONDS, **of
        )
        client.Gauge("in_flight", "Requests now.", **of).set_function(requests)
        client.Gauge("builds_running", "Builds now.", **of).set_function(lambda: builds(True))
        client.Gauge("queue", "Builds that wait.", **of).set_function(lambda: builds(False))

    def answered(self, route: str, status: int, sent: int) -> None:
        """Count an answer."""
        if not self._registry:
            return
        self._requests.labels(route, str(status)).inc()
        self._sent.inc(sent)
        if route in _OF_CACHE:
            (self._misses if status == 404 else self._hits).inc()

    def built(self, outcome: Outcome, seconds: float) -> None:
        """Count a build."""
        if self._registry:
            self._builds.labels(str(outcome.status)).inc()
            self._entries.inc(outcome.built)
            self._seconds.observe(seconds)

    def served(self) -> tuple[int, int] | None:
        """Return how many requests for kernels were answered, and how many builds that took.

        None without prometheus-client.
        """
        if not self._registry:
            return None
        value = self._registry.get_sample_value
        answers = [
            value(f"{_PREFIX}_requests_total", {"route": route, "status": status})
            for route, status in itertools.product(_KERNELS, _ANSWERED)
        ]
        return int(sum(filter(None, answers))), int(value(f"{_PREFIX}_build_seconds_count"))

    def text(self) -> bytes | None:
        """Return all figures, or None without prometheus-client."""
        return bytes(self._text(self._registry)) if self._registry else None
