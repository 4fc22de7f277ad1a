"""The standard library's HTTP as a remote: what is sent, what is taken, and when it gives up."""

import base64
import contextlib
import shutil
import ssl
import subprocess
import threading
import time

import pytest
import web_servers as servers
from helpers import LONGEST
from web_servers import Server, always, closed_port, said, static

from jitkern import config
from jitkern.errors import SettingError
from jitkern.remote.opening import opened
from jitkern.remote.patience import run_with_timeout
from jitkern.remote.store import (
    AccessDenied,
    Service,
    Throttled,
    TooLarge,
    Unavailable,
    Unchanged,
    shown,
)
from jitkern.remote.stores.http import HttpStore


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "a b.json").write_bytes(b"content")
    return tmp_path / "www"


def test_an_object_and_its_tag_over_one_connection(folder):
    with Server(static(folder)) as server:
        store = opened(server.url)
        data, tag = store.get("a b.json", limit=7)
        assert data == b"content" and tag
        with pytest.raises(Unchanged):
            store.get("a b.json", limit=7, unless=tag)
        assert store.get("none", limit=7) is None
        (folder / "a b.json").write_bytes(b"changed")
        assert store.get("a b.json", limit=7, unless=tag).data == b"changed"
        assert server.connections == 1
        assert server.paths[0] == "/base/a%20b.json"


def test_a_server_without_tags_or_lengths():
    body = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    with Server(always(body)) as server:
        store = HttpStore(server.url)
        assert store.get("x", limit=5) == (b"abcde", None)
        assert store.get("x", limit=5) == (b"abcde", None)
        assert server.connections == 1
        with pytest.raises(TooLarge):
            store.get("x", limit=4)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, AccessDenied), (403, AccessDenied), (407, AccessDenied), (429, Throttled), (503, Throttled), (500, Unavailable), (206, Unavailable)],
)  # fmt: skip
def test_a_status_is_told_as_what_it_means(status, kind):
    with Server(always(said(status, b"why"))) as server:
        with pytest.raises(kind, match=str(status)) as raised:
            HttpStore(server.url).get("x", limit=100)
        assert type(raised.value) is kind


@pytest.mark.parametrize("status", [404, 410])
def test_what_is_not_there_is_none(status):
    with Server(always(said(status, b"x" * 9999))) as server:
        assert HttpStore(server.url).get("x", limit=100) is None


@pytest.mark.parametrize(
    "answer",
    [servers.hang, servers.drip, servers.reset, servers.short, always(b"nonsense\r\n\r\n"),
     always(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc"), always(b"HTTP/1.1 abc\r\n\r\n")],
)  # fmt: skip
def test_a_server_that_misbehaves_is_unavailable_in_bounded_time(answer):
    with Server(answer) as server, config.using(remote_timeout=0.5, remote_budget=1):
        store = HttpStore(server.url)
        with pytest.raises(Unavailable) as e:
            run_with_timeout(LONGEST, lambda: store.get("x", limit=10**6))
        assert f"no answer in {LONGEST}" not in str(e.value)


@pytest.mark.parametrize(
    "flood",
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"A: b\r\n"),
    ],
)
@pytest.mark.long
def test_no_thread_reads_heads_or_trailers_for_ever(flood):
    """Nobody waits for it any more, but it would take processor time for the life of the process."""
    ended = threading.Event()

    def answer(connection, request):
        with contextlib.suppress(OSError):
            connection.sendall(flood[0])
            while True:
                connection.sendall(flood[1] * 100)
                time.sleep(0.01)
        ended.set()

    with Server(answer) as server, config.using(remote_timeout=0.5, remote_budget=1):
        with pytest.raises(Unavailable):
            run_with_timeout(0.5, lambda: HttpStore(server.url).get("x", limit=10**6))
        assert ended.wait(LONGEST)


def test_nobody_listens():
    with pytest.raises(Unavailable, match="refused"):
        HttpStore(f"http://127.0.0.1:{closed_port()}").get("x", limit=1)


def test_a_connection_that_the_server_closed_is_made_anew(folder):
    answer = static(folder)

    def once(connection, request):
        connection.sendall(answer(connection, request))  # and closes, though it did not say so

    with Server(once) as server:
        store = HttpStore(server.url)
        for _ in range(3):
            assert store.get("a b.json", limit=7).data == b"content"
        assert server.connections == 3


def test_a_redirect_is_followed_on_the_same_host_alone():
    with Server(lambda c, r: said(302, Location="/base/a%20b.json") if "old" in r.path else
                said(200, b"content")) as server:  # fmt: skip
        assert HttpStore(server.url).get("old", limit=7).data == b"content"
    for location in (
        "http://169.254.169.254/latest/meta-data/",
        "//evil.example/x",
        "https://127.0.0.1/x",
        "file:///etc/passwd",
    ):
        with Server(always(said(302, Location=location))) as server:
            with pytest.raises(Unavailable, match="another place"):
                HttpStore(server.url).get("x", limit=7)
            assert len(server.requests) == 1
    with Server(lambda c, r: said(302, Location=r.path + "x")) as server:
        with pytest.raises(Unavailable, match="too many redirects"):
            HttpStore(server.url).get("x", limit=7)
        assert len(server.requests) == 4


def test_a_token_goes_to_this_machine_or_over_tls_alone(tmp_path, folder):
    token = tmp_path / "token"
    token.write_text("secret\n")
    with Server(static(folder)) as server, config.using(remote_token_file=token):
        HttpStore(server.url).get("x", limit=7)
        assert server.requests[0].headers["authorization"] == "Bearer secret"
        assert "Authorization" in HttpStore("https://example.com").headers
        assert "Authorization" not in HttpStore("http://example.com").headers
        token.write_text("two\nlines")
        with pytest.raises(SettingError, match="expected one line"):
            HttpStore(server.url)
        token.unlink()
        with pytest.raises(SettingError, match="cannot be read"):
            HttpStore(server.url)


def test_a_password_of_the_url_is_sent_and_never_shown(folder):
    with Server(static(folder)) as server:
        url = server.url.replace("127", "user:p%40ss@127")
        store = HttpStore(url)
        store.get("x", limit=7)
        sent = server.requests[0].headers["authorization"].removeprefix("Basic ")
        assert base64.b64decode(sent) == b"user:p@ss"
        assert store.url == shown(url) == server.url
    with pytest.raises(SettingError, match="in clear") as raised:
        HttpStore("http://user:p@example.com")
    assert "user" not in str(raised.value)


@pytest.mark.parametrize(
    "url", ["https:///path", "http://:80/x", "http://host:abc/", "https://host:99999/"]
)
def test_a_url_without_a_host_is_an_error(url):
    with pytest.raises(SettingError, match="names no host"):
        HttpStore(url)


def test_the_proxy_of_the_environment_is_taken(folder, monkeypatch):
    def proxy(connection, request):
        assert request.path == "http://kernels.invalid/base/a%20b.json"
        return said(200, b"content")

    with Server(proxy) as server:
        monkeypatch.setenv("http_proxy", f"http://me:pw@127.0.0.1:{server.port}")
        assert HttpStore("http://kernels.invalid/base").get("a b.json", limit=7).data == b"content"
        assert "proxy-authorization" in server.requests[0].headers
    with Server(static(folder)) as server:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port()}")
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert HttpStore(server.url).get("a b.json", limit=7)


def test_no_proxy_stands_between_this_machine_and_itself(folder, monkeypatch):
    """`trusted_remotes` believes what a server here says unsigned, and a proxy says what it likes."""
    with Server(always(said(200, b"hostile"))) as proxy, Server(static(folder)) as server:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.port}")
        assert HttpStore(server.url).get("a b.json", limit=7).data == b"content"
        assert not proxy.requests


def test_threads_at_the_last_idle_connection_each_get_an_answer(folder):
    class Racy(list):
        def pop(self):
            raise IndexError("another thread was faster")

    with Server(static(folder)) as server:
        store = HttpStore(server.url)
        store.get("a b.json", limit=7)
        store.idle = Racy(store.idle)
        assert store.get("a b.json", limit=7).data == b"content"


def test_a_tunnel_is_asked_of_a_proxy_for_https(monkeypatch):
    with Server(always(said(403))) as server:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{server.port}")
        with pytest.raises(Unavailable, match="403"):
            HttpStore("https://kernels.invalid/base").get("x", limit=7)
        assert (server.requests[0].verb, server.paths[0]) == ("CONNECT", "kernels.invalid:443")


@pytest.mark.long
@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl, for a certificate")
def test_tls_is_checked_against_the_certificates_of_the_system(tmp_path, folder, monkeypatch):
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with Server(static(folder), tls=context) as server:
        url = f"https://localhost:{server.port}/base"
        with pytest.raises(Unavailable, match="certificate"):
            HttpStore(url).get("a b.json", limit=7)
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        store = HttpStore(url)
        assert [store.get("a b.json", limit=7).data for _ in range(2)] == [b"content"] * 2


def test_a_child_makes_connections_of_its_own(folder):
    with Server(static(folder)) as server:
        store = HttpStore(server.url)
        store.get("a b.json", limit=7)
        before = server.connections
        from publishing import in_a_child

        def work():
            assert store.get("a b.json", limit=7).data == b"content"

        assert in_a_child(work) == 0
        assert server.connections == before + 1
        assert store.get("a b.json", limit=7)
        assert server.connections == before + 1


def test_a_server_that_builds_says_so_and_is_posted_to():
    def answer(connection, request):
        if request.verb == "GET":
            return said(404, Jitkern_Builds=1)
        assert request.headers["content-type"] == "application/json"
        return said(202, request.body, Retry_After=3, Jitkern_Builds=1)

    with Server(answer) as server:
        store = HttpStore(server.url)
        assert isinstance(store, Service) and not store.builds
        store.get("x", limit=1)
        assert store.builds
        assert store.post("v1/build", b"{}", limit=9) == (202, b"{}", 3.0)
        assert server.paths[-1] == "/base/v1/build"
    for status, kind in {
        503: Throttled,
        429: Throttled,
        401: AccessDenied,
        500: Unavailable,
    }.items():
        with Server(always(said(status))) as server, pytest.raises(kind):
            HttpStore(server.url).post("v1/build", b"{}", limit=9)
    for status in (400, 404, 405, 409, 413, 422, 501):
        with Server(always(said(status, b"why"))) as server:
            assert HttpStore(server.url).post("v1/build", b"{}", limit=9).status == status
