"""Answers to HTTP requests. Names are parsed strictly; nothing of a URL becomes a path.

GET, HEAD  /jitkern.json   /v1/<machine>/index.json   /v1/<machine>/<SHA-256>.tar[.zst]
GET, HEAD  /v1/entries/<target>/<name>.tar   /v1/build/<id>   /metrics   /healthz
POST       /v1/build
"""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import CancelledError, Future, TimeoutError as NotYet
from typing import BinaryIO
from urllib.parse import unquote

from jitkern.errors import TargetError
from jitkern.remote import layout
from jitkern.service import request
from jitkern.service.build import Outcome
from jitkern.service.connection import Body, Connection
from jitkern.service.flights import Draining, Full
from jitkern.service.metrics import REMEDY
from jitkern.service.request import Asked

_ROUTES = (
    ("root", re.compile("/" + re.escape(layout.ROOT))),
    ("health", re.compile("/healthz")),
    ("metrics", re.compile("/metrics")),
    ("outcome", re.compile("/v1/build/([0-9a-f]{64})")),
    ("entry", re.compile(r"/v1/entries/([\w.+!-]+)/([\w.+!-]+)\.tar", re.ASCII)),
    ("index", re.compile(r"/v1/([\w.+!-]+)/index\.json", re.ASCII)),
    ("bundle", re.compile(r"/v1/([\w.+!-]+)/([0-9a-f]{64}\.tar(?:\.zst)?)", re.ASCII)),
)
_BUILD = f"/{layout.BUILD}"
_NAMED = 8  # files, and digests, in the text of an answer
_LATER = {"Retry-After": "5"}


class Handler(Connection):
    """The answers."""

    def do_GET(self) -> None:  # noqa: N802  the name that http.server calls
        """Answer a GET or a HEAD."""
        path = unquote(self.path)
        for route, pattern in _ROUTES:
            if match := pattern.fullmatch(path):
                self.route = route
                if route == "health" or self.is_allowed():
                    getattr(self, f"_{route}")(*match.groups())
                return
        if self.is_allowed():
            self._missing()

    do_HEAD = do_GET  # noqa: N815  the same

    def do_POST(self) -> None:  # noqa: N802  the same
        """Answer a request to build."""
        if not self.is_allowed():
            return
        if self.path != _BUILD:
            self.refuse(405 if _known(self.path) else 404, f"only {_BUILD} takes a POST")
            return
        self.route = "build"
        if (body := self.body()) is None:
            return
        try:
            asked = request.parsed(body, self.server.modules)
        except ValueError as e:
            self.refuse(422 if isinstance(e, TargetError) else 400, f"{e!s:.1000}")
            return
        if asked.op not in self.server.ops:
            self.refuse(404, f"no package here declares {asked.op}", serves=[*self.server.ops])
            return
        self._fly(asked)

    def _fly(self, asked: Asked) -> None:
        """Answer with what was asked for, once it is built."""
        for _ in range(2):  # again if the files of an earlier build are gone
            try:
                flight = self.server.flights.ask(asked)
            except Full:
                text = f"{self.server.flights.waiting} builds wait already"
                self.refuse(429, text, **_LATER)
                return
            except Draining:
                self.refuse(503, "the service is about to end", **_LATER)
                return
            if self._land(asked.id, flight, asked.want):
                return
            self.server.flights.forget(asked.id)
        self.refuse(503, "the build is not kept here")

    def _outcome(self, id_: str) -> None:
        """Answer with the outcome of an earlier request."""
        flight = self.server.flights.find(id_)
        if flight is None or not self._land(id_, flight, frozenset()):
            self.refuse(404, "no such build runs or ended lately: ask for it again")

    def _land(self, id_: str, flight: Future[Outcome], want: frozenset[str]) -> bool:
        """Answer with the outcome of a build; return False if its bundle is gone."""
        try:
            outcome = flight.result(self._patience())
        except NotYet:
            again = {"Retry-After": "2", "Location": f"{_BUILD}/{id_}"}
            self.refuse(202, "it is being built", **again)
            return True
        except CancelledError:
            self.refuse(503, "the service is about to end", **_LATER)
            return True
        missing = sorted(want - outcome.digests)
        lacking = bool(missing) if want else outcome.failed
        if outcome.status != 200 or (outcome.reason and lacking):
            status = 422 if outcome.status == 200 else outcome.status
            self.refuse(status, outcome.reason)
        elif missing:
            self._differ(outcome, missing)
        else:
            file = self.server.shelf.opened(outcome.bundle)
            if file is None:
                return False
            with file:
                self.answer(200, Body(file=file), "application/x-tar")
        return True

    def _differ(self, outcome: Outcome, missing: list[str]) -> None:
        """Say from which files the client must have something else."""
        names = [f"{name} ({sha[:12]})" for name, sha in outcome.files.items()]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        reason = (
            f"the sources here differ: no entry has the digest {', '.join(missing[:_NAMED])}; "
            f"built here from {', '.join(names[:_NAMED])}{more}, by name and SHA-256"
        )
        digests = sorted(outcome.digests)
        self.refuse(409, reason, files=dict(outcome.files), digests=digests)

    def _patience(self) -> float:
        """Return the seconds to wait for a build: fewer if the client wants so (RFC 7240)."""
        wanted = re.search(r"\bwait=([0-9]{1,4})\b", self.headers.get("Prefer", ""))
        return min(self.server.patience, int(wanted[1])) if wanted else self.server.patience

    def _root(self) -> None:
        self.answer(200, Body(layout.ROOT_CONTENT), "application/json")

    def _health(self) -> None:
        draining = self.server.draining
        self.answer(503 if draining else 200, Body(b"draining\n" if draining else b"ok\n"))

    def _metrics(self) -> None:
        text = self.server.metrics.text()
        if text is None:
            self.refuse(501, f"figures need the package prometheus-client: {REMEDY}")
        else:
            self.answer(200, Body(text), self.server.metrics.content_type)

    def _index(self, machine: str) -> None:
        data = self.server.catalog.index(machine)
        if data is None:
            self._missing()
            return
        tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
        self.answer(
            200, Body(data), "application/json", ETag=tag, **{"Cache-Control": layout.SHORT_LIVED}
        )

    def _bundle(self, machine: str, file: str) -> None:
        self._file(self.server.catalog.bundle(machine, file), f'"{file[:64]}"')

    def _entry(self, target: str, name: str) -> None:
        try:
            layout.entry_of(target, name)
        except ValueError:
            self._missing()
            return
        self._file(self.server.catalog.entry(target, name), f'"{name}"')

    def _file(self, file: BinaryIO | None, tag: str) -> None:
        if file is None:
            self._missing()
            return
        with file:
            kind = "application/x-tar"
            headers = {"Cache-Control": layout.IMMUTABLE}
            self.answer(200, Body(file=file), kind, ETag=tag, **headers)

    def _missing(self) -> None:
        self.refuse(404, "there is no such object")


def _known(path: str) -> bool:
    return any(pattern.fullmatch(path) for _, pattern in _ROUTES)
