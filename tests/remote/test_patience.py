"""Deadlines, the cooldown of a remote that failed and not of a busy one, and Ctrl-C."""

import contextlib
import itertools
import sys
import threading
import time
from functools import partial

import pytest
import web_servers as servers
from helpers import LONGEST, run_threads
from web_servers import Server, closed_port, said, static, trusting

from jitkern import config, jit
from jitkern.errors import NotCached
from jitkern.remote import fetch, patience
from jitkern.remote.patience import (
    COOLDOWN,
    TRIES,
    Cooldown,
    Deadline,
    InCooldown,
    run_with_timeout,
)
from jitkern.remote.store import AccessDenied, Forked, Throttled, TooLarge, Unavailable, Unchanged


def raising(error):
    def request():
        raise error

    return request


@pytest.fixture
def cooldown():
    return Cooldown("https://example.com")


def asked(cooldown, request):
    """The answer to a request that has all the time that it needs."""
    return Deadline(cooldown, LONGEST).run(request, LONGEST)


def test_a_request_gives_what_it_returns_or_raises():
    assert run_with_timeout(LONGEST, lambda: 3) == 3
    with pytest.raises(LookupError):
        run_with_timeout(LONGEST, raising(LookupError()))
    with config.using(remote_timeout=7):
        assert run_with_timeout(LONGEST, config.current).remote_timeout == 7


def test_a_request_without_an_answer_is_left_alone():
    never = threading.Event()
    with pytest.raises(Unavailable, match=r"no answer in 0\.1 s"):
        run_with_timeout(0.1, lambda: never.wait(LONGEST))
    never.set()


def test_ctrl_c_ends_the_wait_at_once(run_python):
    """Of a request that hangs; the process ends, too, though its thread does not."""
    done = run_python(
        "import os, signal, time\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # in the background, too
        "from jitkern.remote.patience import run_with_timeout\n"
        "def request():\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    time.sleep(1000)\n"  # more than this process has
        "try: run_with_timeout(1000, request)\n"
        "except KeyboardInterrupt: print('ended')\n"
    )
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr


@pytest.mark.parametrize(
    ("error", "tries"),
    [
        (Unavailable("reset"), TRIES),
        (KeyError("reset"), TRIES),  # which no store should raise
        (RuntimeError("reset"), TRIES),
        (AccessDenied("reset"), 1),  # another try would be refused, too
    ],
)
def test_a_remote_that_fails_is_off_for_a_minute(cooldown, monkeypatch, caplog, error, tries):
    count = itertools.count()

    def failing():
        next(count)
        raise error

    for again in (Unavailable, InCooldown, InCooldown):
        with pytest.raises(again, match="reset"):
            asked(cooldown, failing)
    assert next(count) == tries
    with pytest.raises(InCooldown, match=r"off for \d+ s more, since it failed: .*reset"):
        asked(cooldown, lambda: 1)
    (line,) = caplog.messages
    assert "https://example.com is off for 60 s" in line and "check the " in line
    now = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + COOLDOWN + 1)
    assert asked(cooldown, lambda: 1) == 1


def test_a_failure_before_an_answer_is_forgotten(cooldown):
    """However many requests are lost, as long as the second try is answered."""
    for answer in (lambda: None, raising(Unchanged())):
        for _ in range(5):
            tries = iter([raising(Unavailable()), answer])
            with contextlib.suppress(Unchanged):
                asked(cooldown, lambda tries=tries: next(tries)())
    assert not cooldown.left()


def test_what_says_nothing_of_the_remote_does_not_count(cooldown, monkeypatch):
    monkeypatch.setattr(patience.random, "random", lambda: 1e9)  # a nap is longer than the budget
    for error in (TooLarge(), Forked()):
        for _ in range(10):
            with pytest.raises(type(error)):
                asked(cooldown, raising(error))
    for _ in range(10):
        with pytest.raises(Throttled, match="busy for"):
            asked(cooldown, raising(Throttled("503")))
    never = threading.Event()
    with pytest.raises(Unavailable):  # too short a wait to blame anybody
        Deadline(cooldown, 0.01).run(lambda: never.wait(LONGEST), LONGEST)
    never.set()
    assert not cooldown.left()


def test_a_busy_remote_is_asked_again_until_the_budget_is_used(cooldown, monkeypatch):
    naps = []
    monkeypatch.setattr(patience.time, "sleep", naps.append)
    monkeypatch.setattr(patience.random, "random", lambda: 1.0)
    answers = itertools.chain([Throttled("503")] * 7, itertools.repeat(None))

    def request():
        if error := next(answers):
            raise error
        return "there"

    assert asked(cooldown, request) == "there"
    assert naps == [0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0]


# ------------------------------------------------------------------ misses


@pytest.mark.parametrize("mode", ["auto", "never"])
def test_a_store_that_is_down_costs_little_and_is_left_alone(
    compiler, source, target, variant, mode, caplog
):
    url = f"http://127.0.0.1:{closed_port()}"
    with trusting(url, compile=mode):
        for n in range(20):
            missed = variant._replace(template=(("N", str(n)),))
            if mode == "auto":
                jit.ensure(missed, target)
            else:
                with pytest.raises(NotCached) as raised:
                    jit.ensure(missed, target)
                assert url in str(raised.value)
                assert ("off for" if n else "refused") in str(raised.value).lower()
    assert len(compiler.compiles) == (20 if mode == "auto" else 0)
    (line,) = caplog.messages
    assert url in line and "off for 60 s" in line


@pytest.mark.parametrize("answer", [servers.hang, servers.drip])
def test_a_store_that_hangs_costs_at_most_the_budget(compiler, variant, target, answer):
    with Server(answer) as server, trusting(server.url):
        with config.using(remote_budget=0.5):
            run_with_timeout(LONGEST, lambda: jit.ensure(variant, target))
        with (
            config.using(compile="never", remote_budget=0.5),
            pytest.raises(NotCached, match="no answer|budget|request may take"),
        ):
            run_with_timeout(
                LONGEST, lambda: jit.ensure(variant._replace(function="other"), target)
            )


def test_a_store_that_refuses_is_asked_once(compiler, variant, target, caplog):
    with Server(servers.always(said(403))) as server, trusting(server.url):
        for n in range(5):
            jit.ensure(variant._replace(template=(("N", str(n)),)), target)
        assert len(server.requests) == 1
    assert ["credentials" in line for line in caplog.messages] == [True]


@pytest.mark.parametrize("failure", [said(500), None])
def test_one_lost_request_is_tried_again(filled, compiler, variant, target, failure):
    answers, answer = itertools.count(), static(filled[0])

    def flaky(connection, request):
        return failure if next(answers) % 2 == 0 else answer(connection, request)

    with Server(flaky) as server, trusting(server.url, compile="never"):
        jit.ensure(variant, target)
        assert len(server.requests) >= 4


@pytest.mark.long
def test_a_crowd_that_gets_503_compiles_nothing_in_the_budget(filled, compiler, variant, target):
    end, answer = time.monotonic() + 20, static(filled[0])

    def busy(connection, request):
        return said(503) if time.monotonic() < end else answer(connection, request)

    done = []

    def work(n, url):
        with trusting(url, compile="never", cache_dir=filled[0].parent / f"own{n}"):
            done.append(jit.ensure(variant, target))

    with Server(busy) as server:
        run_threads(*(partial(work, n, server.url) for n in range(16)))
    assert len(done) == 16 and not compiler.compiles


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="signals of threads")
def test_ctrl_c_during_a_miss_ends_the_call(tmp_path, run_python):
    asked = tmp_path / "asked"

    def hang(*args):
        asked.touch()
        servers.hang(*args)

    with Server(hang) as server:
        conf = servers.settings_file(tmp_path, trusted_remotes=[server.url])
        done = run_python(
            "import os, signal, threading, time, torch\n"
            "import jitkern.ops\n"
            "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
            "x = torch.ones(4)\n"
            "def interrupt():\n"
            f"    while not os.path.exists({str(asked)!r}): time.sleep(0.01)\n"
            "    os.kill(os.getpid(), signal.SIGINT)\n"
            "threading.Thread(target=interrupt, daemon=True).start()\n"
            "try: jitkern.ops.vec_add(x, x)\n"
            "except KeyboardInterrupt: print('ended', flush=True)\n"
            "os._exit(0)\n",
            JITKERN_REMOTE=server.url, JITKERN_COMPILE="never", XDG_CONFIG_HOME=str(conf),
        )  # fmt: skip
    assert done.stdout == "ended\n", (done.stdout, done.stderr)


def test_a_store_that_does_not_open_costs_the_budget(
    tmp_path, compiler, variant, target, monkeypatch
):
    """It reads a file, and imports a package, whose lock a thread of the parent may have."""
    opening = threading.Event()

    def opened(url):
        opening.set()
        time.sleep(600)

    monkeypatch.setattr(fetch, "opened", opened)
    with trusting("file:///x", remote_budget=0.5):
        jit.ensure(variant, target)
        assert opening.wait(LONGEST) and len(compiler.compiles) == 1
        from publishing import in_a_child

        other = variant._replace(template=(("T", "f64"),))
        assert in_a_child(lambda: jit.ensure(other, target)) == 0
