"""Stores of every kind: a directory, stubs in this process, and servers, as far as they are installed."""

import contextlib
import math
import sys
import uuid
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path += [str(TESTS / name) for name in ("remote", "service", "cache_tools", "cache", "launch")]
pytest.register_assert_rewrite("web_servers")

import servers  # noqa: E402
from bucket_stubs import BUCKET, serving  # noqa: E402
from stocked import stock  # noqa: E402
from web_servers import fill  # noqa: E402

from jitkern import config, jit, testing  # noqa: E402
from jitkern.cache.store import Cache  # noqa: E402
from jitkern.cache_tools import signing  # noqa: E402
from jitkern.remote.opening import opened  # noqa: E402

STUBS = {"s3-stub": "s3", "gcs-stub": "gs"}
SERVERS = {"moto": ("s3", servers.moto), "azurite": ("az", servers.azurite)}
KINDS = [
    "directory",
    *STUBS,
    *(pytest.param(name, marks=pytest.mark.conformance) for name in SERVERS),
]


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """The variables by which a server is found, by its name; it is started when it is first asked for."""
    with contextlib.ExitStack() as running:
        found = {}

        def server(name):
            if name not in found:
                folder = tmp_path_factory.mktemp(name)
                found[name] = running.enter_context(SERVERS[name][1](folder))
            return found[name]

        yield server


@pytest.fixture
def set_environment(monkeypatch):
    def set_environment(variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        testing.set_settings(monkeypatch)

    return set_environment


@pytest.fixture
def stub(request, tmp_path, set_environment):
    """The stub of an S3 that does all right, unless the test has it do otherwise."""
    pytest.importorskip("obstore")
    with serving(getattr(request, "param", "s3")) as stub:
        set_environment(stub.environment(tmp_path))
        yield stub


@pytest.fixture
def bucket(stub):
    """A store in that bucket."""
    return opened(f"{stub.dialect}://{BUCKET}/team")


@pytest.fixture(params=KINDS)
def url(request, tmp_path, set_environment, server):
    """The URL of an empty remote, of each kind."""
    kind, prefix = request.param, uuid.uuid4().hex
    if kind == "directory":
        (tmp_path / "remote").mkdir()
        yield (tmp_path / "remote").as_uri()
        return
    pytest.importorskip("obstore")
    if kind in STUBS:
        with serving(STUBS[kind]) as stub:
            set_environment(stub.environment(tmp_path))
            yield f"{STUBS[kind]}://{BUCKET}/{prefix}"
        return
    set_environment(server(kind))
    yield f"{SERVERS[kind][0]}://{servers.BUCKET}/{prefix}"


@pytest.fixture
def store(url):
    return opened(url)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "remote").mkdir()
    return opened((tmp_path / "remote").as_uri())


@pytest.fixture
def full(tmp_path):
    """A cache with the entries of the package alpha."""
    return stock(Cache(tmp_path / "full", fsync=False))


@pytest.fixture
def empty(tmp_path):
    return Cache(tmp_path / "empty", fsync=False)


@pytest.fixture
def key(tmp_path, signing_package):
    signing.keygen(tmp_path / "key")
    return tmp_path / "key"


@pytest.fixture
def public(key):
    return signing.public_key_of(key)


@pytest.fixture(autouse=True)
def fresh_remotes(monkeypatch, tmp_path):
    """A process that has asked no remote yet, without proxies, and that no remote has failed.

    No deadline of a request or of a miss comes, unless a test sets it: this machine may be busy.
    """
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    monkeypatch.setenv("JITKERN_REMOTE_TIMEOUT", "600")
    monkeypatch.setenv("JITKERN_REMOTE_BUDGET", "600")
    monkeypatch.setattr("jitkern.jit.download.expected", lambda *_: math.inf)
    testing.set_settings(monkeypatch)
    testing.forget_remotes(monkeypatch)


@pytest.fixture
def filled(tmp_path, compiler, variant, target):
    """(folder of a remote, key) with the one entry that a fake compiler has built."""
    with config.using(cache_dir=tmp_path / "builder"):
        jit.ensure(variant, target)
        key = jit.key_of(variant, target)
        fill(Cache(tmp_path / "builder"), tmp_path / "remote")
    compiler.compiles.clear()
    return tmp_path / "remote", key
