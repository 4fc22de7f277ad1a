"""Remotes for tests: directories with bundles, web servers that behave, and servers that do not."""

import contextlib
import hashlib
import json
import socket
import ssl
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

from bundling import archive, joined

from jitkern import config
from jitkern.cache.entry import Entry
from jitkern.cache.store import Cache
from jitkern.cache_tools import bundle
from jitkern.cache_tools.listing import EntryFilter, chosen
from jitkern.remote import layout
from jitkern.remote.index import Bundle, Index


def machines(cache: Cache) -> dict[str, list]:
    """The entries of a cache by the machine that may miss them."""
    found = defaultdict(list)
    for entry in chosen(cache, EntryFilter()):
        found[layout.machine_of(entry.path.parent.name)].append(entry)
    return found


def fill(cache: Cache, folder: Path, *, suffix: str = ".tar") -> list[str]:
    """Lay a cache out as a remote: a bundle and an index for each machine. Returns the machines."""
    for machine, entries in machines(cache).items():
        place = folder / "v1" / machine
        place.mkdir(parents=True, exist_ok=True)
        packed = folder / f"packed{suffix}"
        bundle.pack(cache, entries, packed)
        put(folder, machine, packed.read_bytes(), digests(entries), suffix=suffix)
        packed.unlink()
    (folder / layout.ROOT).write_bytes(layout.ROOT_CONTENT)
    return sorted(machines(cache))


def digests(entries: Iterable[Entry]) -> list[str]:
    return sorted(entry.path.name.rpartition("-")[2] for entry in entries)


def put(
    folder: Path, machine: str, data: bytes, entries: list[str], *, suffix: str = ".tar"
) -> str:
    """Write a bundle of these bytes and an index that names it alone; returns its file name."""
    place = folder / "v1" / machine
    place.mkdir(parents=True, exist_ok=True)
    file = hashlib.sha256(data).hexdigest() + suffix
    (place / file).write_bytes(data)
    listed = Bundle(file, len(data), "test", "1", tuple(entries))
    (place / "index.json").write_bytes(Index((listed,)).encode())
    return file


def one_entry(files: dict[str, bytes], target: str, name: str) -> bytes:
    """A bundle of one entry with these files, whatever is wrong with them."""
    return joined(archive({(target, name): files}))


@dataclass
class Request:
    verb: str
    path: str
    headers: dict[str, str]
    body: bytes = b""


@dataclass
class Server:
    """A web server on a free port that answers as `answer` says, and keeps what it was asked.

    answer: takes the connection and the request; returns the bytes of an answer, or None if the
    connection is to be closed.
    """

    answer: Callable[[socket.socket, Request], bytes | None]
    requests: list[Request] = field(default_factory=list)
    connections: int = 0
    tls: ssl.SSLContext | None = None

    def __enter__(self):
        self.socket = socket.create_server(("127.0.0.1", 0), backlog=100)
        self.port = self.socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/base"
        self.accepting = threading.Thread(target=self._accept, daemon=True)
        self.accepting.start()
        return self

    def __exit__(self, *raised):
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self.accepting.join()  # or it accepts on the next server's socket, of the same number
        self.socket.close()

    @property
    def paths(self) -> list[str]:
        return [request.path for request in self.requests]

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                self.connections += 1
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.ExitStack() as open_things:
            open_things.enter_context(contextlib.suppress(OSError, ValueError))
            open_things.enter_context(connection)
            if self.tls:
                connection = self.tls.wrap_socket(connection, server_side=True)
                open_things.enter_context(connection)
            stream = connection.makefile("rb")
            while line := stream.readline():
                verb, path, _ = line.decode().split(" ")
                headers = {}
                while (row := stream.readline()) not in (b"\r\n", b""):
                    name, _, value = row.decode().partition(":")
                    headers[name.lower()] = value.strip()
                body = stream.read(int(headers.get("content-length", 0)))
                request = Request(verb, path, headers, body)
                self.requests.append(request)
                data = self.answer(connection, request)
                if data is None:
                    return
                connection.sendall(data)
                if b"Connection: close" in data:
                    return


def said(status: int, body: bytes = b"", **headers: object) -> bytes:
    """The bytes of an answer."""
    fields = {"Content-Length": len(body), **{k.replace("_", "-"): v for k, v in headers.items()}}
    lines = [f"HTTP/1.1 {status} Told", *(f"{k}: {v}" for k, v in fields.items() if v is not None)]
    return "\r\n".join([*lines, "", ""]).encode() + body


def static(folder: Path, **headers: object) -> Callable[[socket.socket, Request], bytes]:
    """What a static web server answers: the files of a folder below /base/, with an ETag."""

    def answer(_, request):
        path = folder / unquote(request.path.removeprefix("/base/"))
        if request.verb != "GET" or not path.is_file():
            return said(404 if request.verb == "GET" else 405, **headers)
        data = path.read_bytes()
        tag = f'"{hashlib.md5(data).hexdigest()}"'
        if request.headers.get("if-none-match") == tag:
            return said(304, ETag=tag, **headers)
        return said(200, data, ETag=tag, **headers)

    return answer


def hang(connection, request):
    time.sleep(1000)


def drip(connection, request):
    """A byte each tenth of a second."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 50000\r\n\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.1)


def endless(connection, request):
    """A body without an end, and without a length."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
    while True:
        connection.sendall(bytes(1 << 16))


def reset(connection, request):
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def short(connection, request):
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc")


def always(data: bytes):
    return lambda connection, request: data


def closed_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def trusting(*urls: str, **settings: object):
    """A block whose misses ask these remotes, and trust them."""
    return config.using(remote=urls, trusted_remotes=urls, **settings)


def settings_file(folder: Path, **settings: object) -> Path:
    """A settings file; returns what XDG_CONFIG_HOME has to be."""
    path = folder / "config" / "jitkern" / "config.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items()))
    return path.parents[1]
