"""A miss that a service builds: what is posted, when, and what becomes of each answer."""

import itertools
import json

import pytest
import torch
from helpers import declared
from web_servers import Server, always, fill, said, trusting

from jitkern import config, jit
from jitkern.cache.store import Cache
from jitkern.errors import NotCached
from jitkern.runtime import specializer

SCALE = 'extern "C" void twice(T *out, const T *x, long n) { for (long i = 0; i < n; i++) out[i] = 2 * x[i]; }'


@pytest.fixture
def op(tmp_path, request):
    """An op on the real C compiler."""

    def launch(k, x):
        out = torch.empty_like(x)
        k.twice[{"T": x.dtype}](out, x, x.numel())
        return out

    name = "".join(c for c in request.node.name if c.isalnum())
    return declared(
        f"jitkern_service::{name}(Tensor x) -> Tensor",
        tmp_path / "twice.cpp",
        SCALE,
        launch,
        lambda x: 2 * x,
    )


class Service(Server):
    """A server that has nothing below its names, and answers a call with a bundle.

    first: other answers, before that.
    """

    def __init__(self, bundle):
        super().__init__(self.respond)
        self.bundle, self.first, self.posted = bundle, [], []

    def respond(self, connection, request):
        if request.verb == "GET":
            return said(404, Jitkern_Builds=1)
        self.posted.append(json.loads(request.body))
        if self.first:
            return self.first.pop(0)
        return said(200, self.bundle, Jitkern_Builds=1)


@pytest.fixture
def service(tmp_path, op):
    """A service that has built the call of f32."""
    with config.using(cache_dir=tmp_path / "builder"):
        op(torch.ones(4))
        specializer.settle()
    op.forget("cpu")
    fill(Cache(tmp_path / "builder"), tmp_path / "remote")
    (bundle,) = (tmp_path / "remote").rglob("*.tar")
    with Service(bundle.read_bytes()) as server:
        yield server


@pytest.mark.long
def test_a_service_builds_what_a_call_needs(service, op, tmp_path):
    x = torch.arange(4.0)
    with trusting(service.url, compile="never", fallback="raise"):
        assert torch.equal(op(x), 2 * x)
    (posted, *_) = service.posted
    assert sorted(posted) == ["call", "schema", "targets", "want"]
    assert posted["schema"] == 1
    (target,) = posted["targets"]
    assert target.startswith("cpu-") and len(posted["want"][0]) == 64
    call = json.loads(posted["call"])
    assert (call["op"], call["device"], call["kind"]) == (op.name, "cpu", "cc")
    assert call["args"][0]["shape"] == [4]
    with config.using(record=tmp_path / "recorded"):
        op(x)
    assert (tmp_path / "recorded").read_text().strip() == posted["call"]


@pytest.mark.long
def test_a_service_that_is_not_done_is_asked_again(service, op):
    service.first = [said(202, Retry_After=1, Jitkern_Builds=1), said(503), said(429)]
    x = torch.arange(4.0)
    with trusting(service.url, compile="never", fallback="raise"):
        assert torch.equal(op(x), 2 * x)
    assert len(service.posted) >= 4


@pytest.mark.long
@pytest.mark.parametrize(
    ("status", "warns"), [(404, False), (405, False), (409, True), (413, True), (422, True)]
)
def test_what_a_service_does_not_build_is_compiled_here(service, op, status, warns, caplog):
    reason = "kernel.cpp differs:\x1b[31m\n here 1, there 2"
    text = json.dumps({"schema": 1, "reason": reason}) if warns else reason
    answer = said(status, text.encode(), Jitkern_Builds=1)
    service.first = [answer for _ in range(9)]
    x = torch.arange(4.0)
    with trusting(service.url):
        assert torch.equal(op(x), 2 * x)
        specializer.settle()
    told = [line for line in caplog.messages if "kernel.cpp differs:" in line]
    assert bool(told) == warns and not any(c in line for line in told for c in '\x1b{"')
    with (
        trusting(service.url, compile="never", fallback="raise"),
        pytest.raises(NotCached) as caught,
    ):
        op(x.double())
    facts = str(caught.value).splitlines()
    assert len(facts) == 4
    assert f"does not build the entry ({status}): kernel.cpp differs:" in facts[1]


@pytest.mark.long
@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (200, b"<html>", ["v1/build", "is not used"]),
        (409, b"[" * (1 << 20), ["does not build the entry (409): [[["]),
    ],
)
def test_an_odd_answer_is_told_and_not_used(service, op, caplog, status, body, words):
    service.first = [said(status, body, Jitkern_Builds=1) for _ in range(9)]
    x = torch.arange(4.0)
    with trusting(service.url):
        assert torch.equal(op(x), 2 * x)
    assert any(all(word in line for word in words) for line in caplog.messages)


def test_without_a_known_call_nothing_is_posted(compiler, variant, target):
    with Server(always(said(404, Jitkern_Builds=1))) as server:
        with (
            trusting(server.url, compile="never"),
            pytest.raises(NotCached, match="no call is known for which it could build one"),
        ):
            jit.ensure(variant, target)
        assert {request.verb for request in server.requests} == {"GET"}


@pytest.mark.long
def test_a_server_that_says_nothing_is_not_posted_to(op):
    with Server(always(said(404))) as server, trusting(server.url):
        op(torch.arange(4.0))
        specializer.settle()
        assert {request.verb for request in server.requests} == {"GET"}


def test_the_call_is_let_go_when_it_ends():
    ended = itertools.count()
    with jit.current_call.served(lambda: (str(next(ended)), "t")):
        assert jit.current_call.text() == ("0", "t")
        assert jit.current_call.text() == ("0", "t")
    assert jit.current_call.text() is None


def test_a_call_that_no_recording_can_hold_is_not_known():
    def describe():
        raise TypeError("a Generator")

    with jit.current_call.served(describe):
        assert jit.current_call.text() is None
