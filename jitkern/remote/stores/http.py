"""A remote behind HTTP or HTTPS, by the standard library: read, and requests to build."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import quote, unquote, urljoin, urlsplit

from jitkern import config
from jitkern._fork import after_fork
from jitkern._version import __version__
from jitkern.errors import SettingError
from jitkern.remote import layout
from jitkern.remote.store import (
    AccessDenied,
    Object,
    Response,
    Tag,
    Throttled,
    TooLarge,
    Unavailable,
    Unchanged,
    is_loopback,
    shown,
)

REDIRECTS = 3
MOST_TEXT = 64 << 10  # bytes of an answer that is an error
MOST_KEPT = 4  # idle connections
_JSON = {"Content-Type": "application/json"}
_GONE = (404, 410)
_BUSY = (429, 503)
_REFUSED = (401, 403, 407)


class HttpStore:
    """The remote behind a URL of HTTP or HTTPS. A tag is an ETag.

    builds: whether the last answer came from a service that builds.
    """

    def __init__(self, url: str) -> None:
        """Read the token. Raises SettingError for a URL without a host, or an unreadable token."""
        settings = config.current()
        self.url = shown(url)
        self.builds = False
        parts = urlsplit(self.url)
        self._scheme, self._netloc = parts.scheme, parts.netloc
        try:
            self._at = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            self._at = "", 0
        if not self._at[0]:
            raise SettingError(f"`{self.url}` names no host: expected https://host/path")
        self._prefix = ""  # of paths, where a proxy is asked for a whole URL
        self._path = parts.path.rstrip("/") + "/"
        self._timeout = settings.remote_timeout
        self._longest = max(settings.remote_timeout, settings.remote_budget)
        self.headers = {"User-Agent": f"jitkern/{__version__}", "Accept-Encoding": "identity"}
        if secret := _secret(url):
            self.headers["Authorization"] = secret
        self.idle: list[http.client.HTTPConnection] = []
        after_fork(self.idle.clear)

    def __del__(self) -> None:
        for connection in self.__dict__.get("idle", ()):
            connection.close()

    def get(self, name: str, *, limit: int, unless: Tag = None) -> Object | None:
        """Return an object, as Readable says."""
        headers = {"If-None-Match": unless} if unless else {}
        status, data, found = self._request("GET", self._path + quote(name), None, headers, limit)
        if status == http.client.NOT_MODIFIED and unless:
            raise Unchanged
        if status in _GONE:
            return None
        if status != http.client.OK:
            raise _error(status)
        return Object(data, found.get("ETag"))

    def post(self, name: str, data: bytes, *, limit: int) -> Response:
        """Post JSON, as Service says."""
        status, content, found = self._request("POST", self._path + quote(name), data, _JSON, limit)
        broken = status >= 500 and status != http.client.NOT_IMPLEMENTED
        if broken or status in (*_BUSY, *_REFUSED):
            raise _error(status)
        wait = found.get("Retry-After") or ""
        return Response(status, content, float(wait) if wait.isascii() and wait.isdigit() else 0.0)

    def _request(
        self, verb: str, path: str, body: bytes | None, headers: dict[str, str], limit: int
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        """Return status, content and headers of an answer that redirects to nowhere else."""
        end = time.monotonic() + self._longest
        for _ in range(REDIRECTS + 1):
            try:
                status, data, found = self._exchanged(verb, path, body, headers, limit, end)
            except (OSError, http.client.HTTPException, UnicodeError) as e:
                raise Unavailable(f"{type(e).__name__}: {e!s:.160}") from e
            self.builds = found.get(layout.BUILDS) == "1"
            if status not in (301, 302, 303, 307, 308):
                return status, data, found
            target = urljoin(f"{self.url}/", found.get("Location") or "")
            if urlsplit(target)[:2] != (self._scheme, self._netloc) or verb != "GET":
                raise Unavailable(f"it redirects to another place, {shown(target)!r:.120}")
            path = urlsplit(target).path
        raise Unavailable("it has too many redirects")

    def _exchanged(
        self, verb: str, path: str, body: bytes | None, headers: dict[str, str], limit: int,
        end: float,
    ) -> tuple[int, bytes, http.client.HTTPMessage]:  # fmt: skip
        """Return status, content and headers of one response, by a connection that is then kept."""
        while True:
            connection, is_kept = self._borrow()
            began = is_whole = False
            try:
                if connection.sock is None:
                    connection.connect()
                # An answer begins at once, but for a build, which ends before it is answered.
                connection.sock.settimeout(self._timeout if verb == "GET" else self._longest)
                with _ended_at(end, connection.sock):
                    headers = {**self.headers, **headers}
                    connection.request(verb, self._prefix + path, body, headers)
                    with connection.getresponse() as response:
                        began = True
                        data = _read(response, limit)
                        is_whole = response.isclosed() and not response.will_close
            except BaseException as e:
                connection.close()
                if is_kept and not began and isinstance(e, (OSError, http.client.HTTPException)):
                    continue  # the server has closed it meanwhile
                raise
            if is_whole and len(self.idle) < MOST_KEPT:
                self.idle.append(connection)
            else:
                connection.close()
            return response.status, data, response.headers

    def _borrow(self) -> tuple[http.client.HTTPConnection, bool]:
        """Return a connection that no other thread has, and whether it was used before."""
        try:
            return self.idle.pop(), True
        except IndexError:
            return self._connection(), False

    def _connection(self) -> http.client.HTTPConnection:
        """Return a new connection, through the proxy that the environment names, if any.

        None leads to this machine, whose answers are trusted as no proxy's are.
        """
        proxy = urllib.request.getproxies().get(self._scheme, "")
        if is_loopback(self.url) or urllib.request.proxy_bypass(self._netloc):
            proxy = ""
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        login = _basic(parts.username, parts.password)
        proxied = {"Proxy-Authorization": login} if login else {}
        place = (parts.hostname or "", parts.port or 80) if proxy else self._at
        if self._scheme == "https":
            context = ssl.create_default_context()
            secure = http.client.HTTPSConnection(*place, timeout=self._timeout, context=context)
            if proxy:
                secure.set_tunnel(*self._at, proxied)
            return secure
        if proxy:
            self._prefix = f"http://{self._netloc}"
            self.headers.update(proxied)
        return http.client.HTTPConnection(*place, timeout=self._timeout)


@contextmanager
def _ended_at(end: float, connection: socket.socket) -> Iterator[None]:
    """End a connection that is still read at a time (`time.monotonic`).

    Otherwise a server could have a thread of this process read heads or trailers for ever.
    """

    def cut() -> None:
        with suppress(OSError):
            socket.socket.shutdown(connection, socket.SHUT_RDWR)  # below TLS

    with config.background.overdue(end - time.monotonic(), cut):
        yield


def _read(response: http.client.HTTPResponse, limit: int) -> bytes:
    """Return the content of a response.

    It has at most `limit` bytes, or is the beginning of a text that says what went wrong.
    """
    size, wanted = response.length, response.status == http.client.OK
    if wanted and size is not None and size > limit:
        raise TooLarge(f"it has {size} bytes, over {limit}")
    most = limit if wanted else MOST_TEXT
    data = response.read(most + 1 if size is None else min(size, most))
    if wanted and len(data) > most:
        raise TooLarge(f"it has more than {limit} bytes")
    if size is not None and len(data) < min(size, most):
        raise Unavailable(f"it was cut off after {len(data)} of {size} bytes")
    return data[:most]


def _error(status: int) -> Unavailable:
    text = f"{status} {http.client.responses.get(status, '')}".strip()
    kind = Throttled if status in _BUSY else AccessDenied if status in _REFUSED else Unavailable
    return kind(text)


def _secret(url: str) -> str:
    """Return the header `Authorization` for a URL, or "". Raises SettingError."""
    parts = urlsplit(url)
    safe = parts.scheme == "https" or is_loopback(url)
    if parts.username:
        if not safe:
            raise SettingError(f"{shown(url)}: its password would be sent in clear: use https")
        return _basic(parts.username, parts.password)
    path = config.current().remote_token_file
    if path is None or not safe:
        return ""
    try:
        token = path.read_text("ascii").strip()
    except (OSError, UnicodeError) as e:
        raise SettingError(f"remote_token_file: {path} cannot be read: {e}") from e
    if not token.isprintable() or " " in token:
        raise SettingError(f"remote_token_file: {path} holds no token: expected one line")
    return f"Bearer {token}" if token else ""


def _basic(user: str | None, password: str | None) -> str:
    if not user:
        return ""
    pair = f"{unquote(user)}:{unquote(password or '')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"
