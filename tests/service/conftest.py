"""A server in this process, with workers of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from clients import Client, Gate
from helpers import LONGEST

import jitkern.ops
from jitkern.service import builds, handler, server as room
from jitkern.service.server import Server


@pytest.fixture(autouse=True)
def patient(monkeypatch) -> None:
    """No deadline of the service comes, unless a test sets it: this machine may be busy."""
    for holder, name in (
        (Server, "patience"), (room, "LAST"), (handler, "IDLE"), (handler, "READING"),
        (builds, "KEPT"), (builds, "PATIENCE"),
    ):  # fmt: skip
        monkeypatch.setattr(holder, name, 600.0)


@pytest.fixture
def serve(patient) -> Iterator[Callable[..., Server]]:
    """Start servers, of `vec_add` unless said; each is drained at the end."""
    running: list[tuple[Server, threading.Thread]] = []

    def start(*ops, **options) -> Server:
        chosen = ops or (jitkern.ops.vec_add,)
        server = Server(chosen, ("127.0.0.1", 0), handler.Handler, **options)
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        if not server.draining:
            server.drain(0)
        thread.join(LONGEST)
        assert not thread.is_alive()


@pytest.fixture
def client(serve) -> Client:
    """A client of a server of `vec_add`."""
    return Client(serve().url)


@pytest.fixture
def gated(serve, monkeypatch) -> Callable[..., Server]:
    """Start servers whose builds wait until the file `open` is in the folder of bundles."""
    monkeypatch.setattr(room, "CallBuilder", Gate)
    return serve
