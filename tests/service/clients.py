"""What a client of the service sends, and how it reads the answers."""

import http.client
import json
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from helpers import LONGEST, run_threads

from jitkern.service.builds import Outcome
from jitkern.target import Target

HERE = str(Target.current("cpu"))
MACHINE = f"{HERE}-linux_x86_64"


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Client:
    """A client with one connection."""

    def __init__(self, url: str) -> None:
        self.connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=2 * LONGEST)

    def __del__(self) -> None:
        self.connection.close()

    def ask(self, verb: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.connection.request(verb, path, body, named)
        answer = self.connection.getresponse()
        return Answer(answer.status, answer.headers, answer.read())

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def figure(self, name: str) -> float:
        """A figure of /metrics: `queue`, or `builds_total{status="200"}`."""
        return figures(self.get("/metrics").body).get(f"jitkern_serve_{name}", 0.0)

    def build(self, call: str, targets=(HERE,), want=(), **headers: str) -> Answer:
        return self.ask("POST", "/v1/build", asked(call, targets, want), **headers)


def asked(call: str, targets=(HERE,), want=()) -> bytes:
    fields = {"schema": 1, "call": call, "targets": [*targets], "want": [*want]}
    return json.dumps(fields).encode()


def tensor(*shape: int, dtype: str = "float32") -> dict[str, Any]:
    stride = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        stride[i - 1] = stride[i] * shape[i]
    return {"tensor": dtype, "shape": [*shape], "stride": stride, "offset": 0}


def line(op: str, *args: Any, kind: str = "cc") -> str:
    """A line as JITKERN_RECORD writes it."""
    fields = {"op": op, "module": "anything", "device": "cpu", "kind": kind, "args": [*args]}
    return json.dumps({"schema": 1, **fields}, separators=(",", ":"))


VEC_ADD = line("jitkern::vec_add", tensor(1000), tensor(1000))


def at_once(count: int, work) -> list[Any]:
    """What `count` threads return that begin together."""
    results: list[Any] = []
    run_threads(*(lambda n=n: results.append(work(n)) for n in range(count)))
    return results


class Gate:
    """A build that waits for a file, and then packs nothing. Each beginning leaves a file."""

    def __init__(self, _ops: object, folder: Path, _key: object) -> None:
        self.folder = folder

    def __call__(self, asked: Any, jobs: int) -> Outcome:
        import time

        (self.folder / f"begun-{asked.id}").touch()
        while not (self.folder / "open").exists():
            time.sleep(0.01)
        if asked.op.endswith("dies"):
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        (self.folder / f"{asked.id}.tar").write_bytes(b"bundle")
        return Outcome(200, bundle=f"{asked.id}.tar", built=1)


def figures(text: bytes) -> dict[str, float]:
    """The figures of /metrics by their names with labels."""
    rows = [row.rpartition(" ") for row in text.decode().splitlines() if row[:1] != "#"]
    return {name: float(value) for name, _, value in rows}
