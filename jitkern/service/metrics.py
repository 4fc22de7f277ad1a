"""Figures of the service in the text format of Prometheus: `pip install "jitkern[serve]"`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jitkern.service.build import Outcome

REMEDY = 'pip install "jitkern[serve]"'
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 180, 600)
_NONE: Any = None
_KERNELS = ("bundle", "build", "outcome")  # routes
_ANSWERED = ("200", "304", "409", "422")


class Metrics:
    """The metrics of one server, in a separate registry; none without prometheus-client.

    requests, running, queue: return how many requests, builds and waiting builds there are now.
    """

    def __init__(
        self, requests: Callable[[], int], running: Callable[[], int], queue: Callable[[], int]
    ) -> None:
        try:
            import prometheus_client as client
        except ImportError:
            self._registry = _NONE
            return
        registry = self._registry = client.CollectorRegistry()
        self._text = client.generate_latest
        self.content_type: str = client.CONTENT_TYPE_LATEST
        counter, gauge, prefix = client.Counter, client.Gauge, "jitkern_serve"
        self._requests = counter(
            f"{prefix}_requests", "Requests.", ["route", "status"], registry=registry
        )
        self._hits = counter(f"{prefix}_hits", "GET requests that hit.", registry=registry)
        self._misses = counter(f"{prefix}_misses", "GET requests that missed.", registry=registry)
        self._sent = counter(f"{prefix}_sent_bytes", "Bytes of answers.", registry=registry)
        self._builds = counter(f"{prefix}_builds", "Builds.", ["status"], registry=registry)
        self._entries = counter(f"{prefix}_built_entries", "Entries built.", registry=registry)
        self._seconds = client.Histogram(
            f"{prefix}_build_seconds", "Seconds of builds.", buckets=_SECONDS, registry=registry
        )
        for name, text, now in (
            ("in_flight", "Requests now.", requests),
            ("builds_running", "Builds now.", running),
            ("queue", "Builds that wait.", queue),
        ):
            gauge(f"{prefix}_{name}", text, registry=registry).set_function(now)

    def answered(self, route: str, status: int, sent: int, *, from_cache: bool) -> None:
        """Count an answer. from_cache: whether it is of a GET that the cache answers."""
        if not self._registry:
            return
        self._requests.labels(route, str(status)).inc()
        self._sent.inc(sent)
        if from_cache:
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
        counters = (self._requests, self._builds)
        samples = [s for counter in counters for found in counter.collect() for s in found.samples]
        totals = [s for s in samples if s.name.endswith("_total")]
        answered = [
            s for s in totals
            if s.labels.get("route") in _KERNELS and s.labels["status"] in _ANSWERED
        ]  # fmt: skip
        built = [s for s in totals if "route" not in s.labels]
        return int(sum(s.value for s in answered)), int(sum(s.value for s in built))

    def text(self) -> bytes | None:
        """Return all figures, or None without prometheus-client."""
        return bytes(self._text(self._registry)) if self._registry else None
