"""A server in this process, with workers of its own."""

import threading
from collections.abc import Callable, Iterator

import pytest
from clients import Client, Gate

import jitkern.ops
from jitkern.service import builds, server as room
from jitkern.service.app import Application
from jitkern.service.server import Server


@pytest.fixture(autouse=True)
def patient(monkeypatch) -> None:
    """No deadline of the service comes, unless a test sets it: this machine may be busy."""
    for holder, name in (
        (Server, "patience"), (room, "LAST"), (room, "IDLE"),
        (builds, "KEPT"), (builds, "PATIENCE"),
    ):  # fmt: skip
        monkeypatch.setattr(holder, name, 600.0)


@pytest.fixture
def serve(patient) -> Iterator[Callable[..., Server]]:
    """Start servers, of `vec_add` unless said; each is drained at the end."""
    running: list[Server] = []

    def start(*ops, **options) -> Server:
        server = Server(ops or (jitkern.ops.vec_add,), ("127.0.0.1", 0), **options)
        server.start(Application(server))
        running.append(server)
        return server

    yield start
    for server in running:
        if not server.draining:
            server.drain(0)
    assert not [thread for thread in threading.enumerate() if thread.name == "jitkern serve"]


@pytest.fixture
def client(serve) -> Client:
    """A client of a server of `vec_add`."""
    return Client(serve().url)


@pytest.fixture
def gated(serve, monkeypatch) -> Callable[..., Server]:
    """Start servers whose builds wait until the file `open` is in the folder of bundles."""
    monkeypatch.setattr(room, "CallBuilder", Gate)
    return serve
