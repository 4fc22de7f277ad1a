"""The server: tokens, figures, bounds, and its end."""

import contextlib
import gc
import os
import signal
import socket
import threading
from urllib.parse import urlsplit

import pytest
from clients import VEC_ADD, Client, Gate, asked, figures, line, tensor
from helpers import LONGEST, until

from jitkern import config
from jitkern.service import builds, server as room
from jitkern.service.builds import Outcome


def raw(server, data):
    """All that the server answers to bytes, until it closes."""
    with connected(server) as client:
        with contextlib.suppress(ConnectionError):  # at a refusal before the end of the data
            client.sendall(data)
        return read(client)


def read(client):
    answer = b""
    with contextlib.suppress(ConnectionResetError):  # where not all that was sent was read
        while part := client.recv(1 << 16):
            answer += part
    return answer


def connected(server):
    parts = urlsplit(server.url)
    return socket.create_connection((parts.hostname, parts.port), timeout=LONGEST)


@pytest.mark.long
def test_a_token_is_asked_for_everywhere_but_for_health(serve):
    client = Client(serve(token=b"secret").url)
    paths = ("/jitkern.json", "/metrics", "/v1/x/index.json", "/nothing", f"/v1/build/{'0' * 64}")
    for authorization in (
        "",
        "Bearer",
        "Bearer wrong",
        "Basic secret",
        "Bearer secret2",
        "Bearer ä",
    ):
        for path in paths:
            answer = client.get(path, Authorization=authorization)
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        assert client.build(VEC_ADD, Authorization=authorization).status == 401
    assert client.get("/healthz").status == 200
    assert client.build(VEC_ADD, Authorization="Bearer secret").status == 200
    assert client.get("/jitkern.json", Authorization="Bearer secret").status == 200


def test_what_wants_a_token_is_private_to_caches_between(serve):
    index = "/v1/cpu-x86_64-torch2.13.0-linux_x86_64/index.json"
    secret = Client(serve(token=b"secret").url).get(index, Authorization="Bearer secret")
    assert secret.headers["Cache-Control"] == "private, max-age=30"
    assert Client(serve().url).get(index).headers["Cache-Control"] == "public, max-age=30"


@pytest.mark.long
def test_figures_tell_of_requests_builds_and_bytes(serve):
    server = serve()
    client = Client(server.url)
    answer = client.build(VEC_ADD)
    client.get("/nothing")
    found = figures(client.get("/metrics").body)
    assert found['jitkern_serve_requests_total{route="build",status="200"}'] == 1
    assert found['jitkern_serve_requests_total{route="other",status="404"}'] == 1
    assert found["jitkern_serve_build_seconds_count"] == 1
    assert found["jitkern_serve_build_seconds_sum"] > 0
    assert found["jitkern_serve_in_flight"] == 1  # this one
    assert found["jitkern_serve_queue"] == found["jitkern_serve_builds_running"] == 0
    assert found["jitkern_serve_sent_bytes_total"] > len(answer.body)
    other = figures(Client(serve().url).get("/metrics").body)
    assert other["jitkern_serve_sent_bytes_total"] == 0  # each server has its own


JSON = b'{"schema": 1, "reason": '
NO_HTTP = b"Invalid HTTP request received."


@pytest.mark.parametrize(
    ("data", "status", "says"),
    [
        (b"GET\r\n\r\n", 400, NO_HTTP),
        (b"GET / HTTP/9.9\r\n\r\n", 505, JSON),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, NO_HTTP),
        (b"DELETE / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 501, JSON),
        (b"PUT /v1/build HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 501, JSON),
        (b"GET /healthz HTTP/1.1\r\nConnection: close\r\n\r\n", 400, NO_HTTP),
        (b"GET /" + b"a" * 700_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", 400, NO_HTTP),
        (b"POST /v1/build HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", 411, JSON),
        (b"POST /v1/build HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411, JSON),
        (b"POST /v1/build HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab", 400, NO_HTTP),
        (b"POST /v1/build HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 411, JSON),
        (b"POST /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", 405, JSON),
        (b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}", 404, JSON),
        (b"GET /healthz HTTP/1.1\r\nHost: x\r\nContent-Length: 40\r\n\r\nGET /jitkern.json HTTP/1.1\r\nHost: xx\r\n\r\n", 200, b"ok\n"),
    ],
    ids=range(14),
)  # fmt: skip
def test_odd_requests_get_one_answer_and_no_more(serve, data, status, says):
    head, _, body = raw(serve(), data).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), head
    assert b"connection: close" in head.lower()
    assert says in body and b"HTTP/1.1 " not in body


def test_a_build_may_take_longer_than_a_request(gated, monkeypatch):
    monkeypatch.setattr(room, "IDLE", 1)
    server = gated()
    with connected(server) as client:
        body = asked(VEC_ADD)
        head = b"POST /v1/build HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        client.sendall(head + body)
        client.settimeout(1)
        with pytest.raises(TimeoutError):
            client.recv(1)
        (server.catalog.folder / "open").touch()
        client.settimeout(LONGEST)
        assert read(client).endswith(b"\r\n\r\nbundle")


def test_connections_are_bounded(serve, monkeypatch):
    monkeypatch.setattr(room, "MOST_CONNECTIONS", 6)
    server = serve()
    silent = [connected(server) for _ in range(6)]
    get = b"GET /healthz HTTP/1.0\r\n\r\n"
    until(lambda: raw(server, get).startswith(b"HTTP/1.1 503 "))
    for client in silent:
        client.close()
    until(lambda: raw(server, get).startswith(b"HTTP/1.1 200 "))


def test_a_connection_serves_many_requests(serve):
    client = Client(serve().url)
    client.get("/healthz")
    sock = client.connection.sock
    for _ in range(20):
        assert client.get("/healthz").status == 200
        assert client.get("/nothing").status == 404
        assert client.ask("POST", "/v1/build", b"x").status == 400
    assert client.connection.sock is sock


def test_a_line_is_told_for_each_request(serve):
    lines = []
    client = Client(serve(tell=lines.append).url)
    client.get("/healthz")
    until(lambda: lines)
    assert "'GET /healthz HTTP/1.1' 200 3 bytes" in lines[0]


def test_no_request_can_write_a_log_line_or_a_terminal_code(serve):
    lines = []
    server = serve(tell=lines.append)
    raw(server, b"GET /\x1b[2J\rforged HTTP/1.0\r\n\r\n")  # which is no HTTP
    raw(server, b"GET /%1b[2J%0Dforged?\x7e%0a HTTP/1.0\r\n\r\n")
    until(lambda: lines)
    assert all(text.isprintable() for text in lines), lines


def test_a_drain_finishes_builds_and_begins_none(gated):
    server = gated(jobs=1)
    url = server.url
    answers = {}
    calls = {n: line("jitkern::vec_add", tensor(n), tensor(n)) for n in (1, 2)}

    def ask(number):
        answers[number] = Client(url).build(calls[number])

    idle = Client(url)
    assert idle.get("/healthz").status == 200
    threads = [threading.Thread(target=ask, args=(n,)) for n in calls]
    threads[0].start()
    until(lambda: Client(url).figure("builds_running") == 1)
    threads[1].start()
    until(lambda: Client(url).figure("queue") == 1)
    drain = threading.Thread(target=server.drain, args=(600.0,))
    drain.start()
    threads[1].join(LONGEST)
    (server.catalog.folder / "open").touch()
    for thread in (*threads, drain):
        thread.join(LONGEST)
    assert answers[1][::2] == (200, b"bundle")
    assert (answers[2].status, answers[2].headers["Retry-After"]) == (503, "5")
    with pytest.raises(ConnectionError):
        Client(url).get("/healthz")
    assert not server.catalog.folder.exists()


def end(worker):
    worker.stop(at_once=True)
    worker.ended()


def drained_in_a_build(server):
    """The answers to the one client whose build runs when a server drains."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(Client(server.url).build(VEC_ADD)))
    thread.start()
    until(lambda: [*server.catalog.folder.glob("begun-*")])
    server.drain(0.1)
    thread.join(LONGEST)
    return answers


def test_a_drain_ends_builds_that_take_too_long(gated, caplog):
    server = gated(jobs=1)
    answers = drained_in_a_build(server)
    assert [answer.status for answer in answers] == [422]
    gc.collect()  # asyncio tells then of errors that nobody asked for
    assert [text[:28] for text in caplog.messages] == ["1 builds did not end within "]


def test_a_drain_kills_what_heeds_no_signal(gated, monkeypatch):
    monkeypatch.setattr(builds, "PATIENCE", 0.2)

    class Deaf(Gate):
        def __call__(self, asked, jobs):
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            return super().__call__(asked, jobs)

    monkeypatch.setattr(room, "CallBuilder", Deaf)
    server = gated(jobs=1)
    answers = drained_in_a_build(server)
    assert [(a.status, "SIGKILL" in a.json["reason"]) for a in answers] == [(422, True)]


def test_a_server_changes_no_setting_of_its_process(serve):
    before = config.current()
    serve()
    assert config.current() is before


def test_where_no_process_can_be_started_it_is_503(gated, monkeypatch):
    server = gated(jobs=1)
    end(server.builds.workers[0])

    def refuse(*_):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("os.fork", refuse)
    answer = Client(server.url).build(VEC_ADD)
    assert (answer.status, "no process can be started" in answer.json["reason"]) == (503, True)


@pytest.mark.long
def test_a_worker_has_no_socket_of_its_parent(gated, monkeypatch):
    """Else a client would wait for the end of an answer as long as the worker lives."""

    def descriptors(asked, jobs):
        paths = [f"/dev/fd/{number}" for number in os.listdir("/dev/fd")]
        return Outcome(422, " ".join(os.readlink(path) for path in paths if os.path.exists(path)))

    monkeypatch.setattr(room, "CallBuilder", lambda *_: descriptors)
    server = gated(jobs=2)
    clients = [Client(server.url) for _ in range(3)]
    for client in clients:
        assert client.get("/healthz").status == 200
    end(server.builds.workers[0])  # the next one is forked while clients are connected
    end(server.builds.workers[1])
    found = clients[0].build(VEC_ADD).json["reason"].split()
    assert len([name for name in found if name.startswith("socket:")]) == 1, found  # its pipe
