"""A server in this process, with workers of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from clients import Client, Gate

import jitkern.ops
from jitkern.service import server as room
from jitkern.service.server import Options, Server


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    """Start servers, of `vec_add` unless said; each is drained at the end."""
    running: list[tuple[Server, threading.Thread]] = []

    def start(*ops, **options) -> Server:
        chosen = ops or (jitkern.ops.vec_add,)
        server = Server(chosen, Options(("127.0.0.1", 0), **options))
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        running.append((server, thread))
        return server

    yield start
    for server, thread in running:
        if not server.draining:
            server.drain(0)
        thread.join(60)
        assert not thread.is_alive()


@pytest.fixture
def client(serve, monkeypatch) -> Client:
    """A client of a server of `vec_add`, which waits for builds on a busy machine too."""
    monkeypatch.setattr(Server, "patience", 300.0)
    return Client(serve().url)


@pytest.fixture
def gated(serve, monkeypatch) -> Callable[..., Server]:
    """Start servers whose builds wait until the file `open` is in the folder of bundles."""
    monkeypatch.setattr(room, "Build", Gate)
    monkeypatch.setattr(Server, "patience", 60.0)
    return serve
