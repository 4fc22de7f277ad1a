"""Buckets by obstore: how their errors are told, and the traps that cost hangs and aborts."""

import re
import subprocess
import sys

import pytest
from bucket_stubs import BUCKET
from helpers import LONGEST, replaced

from jitkern import testing
from jitkern.errors import JitkernError, SettingError
from jitkern.remote.opening import opened
from jitkern.remote.patience import run_with_timeout
from jitkern.remote.store import AccessDenied, Throttled, Unavailable

NAME = "v1/cpu-x86_64-torch2.13.0-linux_x86_64/index.json"
DIALECTS = pytest.mark.parametrize("stub", ["s3", "gs"], indirect=True)


def asked(store):
    """Every verb, as functions without arguments."""
    return {
        "get": lambda: store.get(NAME, limit=100),
        "stat": lambda: store.stat(NAME),
        "create": lambda: store.create(NAME, b"1"),
        "replace": lambda: store.replace(NAME, b"1", {"e_tag": '"x"', "version": "1"}),
        "list": lambda: list(store.list("v1/")),
    }


@DIALECTS
@pytest.mark.parametrize(
    ("status", "error"),
    [
        (503, Throttled),
        (429, Throttled),
        (401, AccessDenied),
        (403, AccessDenied),
        (500, Unavailable),
        (502, Unavailable),
    ],
)
def test_the_status_of_an_answer_decides_which_error_it_is(stub, bucket, status, error):
    """obstore tells 429, 500 and 503 apart in the text of an error alone: another version may word it otherwise."""
    stub.status = status
    for verb, ask in asked(bucket).items():
        stub.requests.clear()
        with pytest.raises(Unavailable) as e:
            ask()
        assert type(e.value) is error, verb
        assert len(stub.requests) == 1, f"{verb} asked again by itself"
        assert "\n" not in str(e.value) and len(str(e.value)) < 400


def test_a_conflict_is_a_lost_race(stub, bucket):
    stub.status, stub.error = 409, "<Error><Code>ConditionalRequestConflict</Code></Error>"
    assert asked(bucket)["create"]() is False
    assert asked(bucket)["replace"]() is False
    assert len(stub.requests) == 2


def test_a_missing_bucket_is_seen_when_written_or_listed(stub, bucket):
    stub.status, stub.error = 404, "<Error><Code>NoSuchBucket</Code></Error>"
    assert asked(bucket)["get"]() is None
    assert asked(bucket)["stat"]() is None
    for verb in ("create", "list"):
        with pytest.raises(Unavailable):
            asked(bucket)[verb]()
    assert asked(bucket)["replace"]() is False


def test_a_server_that_cannot_do_conditions_is_unavailable(stub, bucket):
    stub.status = 501
    with pytest.raises(Unavailable):
        asked(bucket)["create"]()


def test_no_query_of_a_url_is_in_an_error(stub, bucket):
    stub.status, stub.verb = 500, "GET"
    with pytest.raises(Unavailable) as e:
        asked(bucket)["list"]()
    assert "127.0.0.1" in str(e.value) and "prefix=" not in str(e.value)


def test_a_request_has_a_deadline(stub, monkeypatch):
    testing.set_settings(monkeypatch, replaced(remote_timeout=0.2))
    stub.delay = 2 * LONGEST
    store = opened(f"s3://{BUCKET}")
    with pytest.raises(Unavailable) as e:
        run_with_timeout(LONGEST, lambda: store.get(NAME, limit=10))
    assert f"no answer in {LONGEST}" not in str(e.value)


def test_an_object_over_the_limit_is_refused_before_it_is_read(stub, bucket, monkeypatch):
    bucket.create(NAME, bytes(100))
    stub.objects[f"team/{NAME}"] = (_Endless(), *stub.objects[f"team/{NAME}"][1:])
    with pytest.raises(Unavailable, match=f"{10**12} bytes"):
        bucket.get(NAME, limit=1000)


class _Endless(bytes):
    """A terabyte that is announced."""

    def __len__(self):
        return 10**12


def test_what_holds_bundles_is_immutable_and_an_index_is_not(stub, bucket):
    names = {"jitkern.json": "max-age=30", NAME: "max-age=30"}
    immutable = "public, max-age=31536000, immutable"
    names["v1/m/" + "0" * 64 + ".tar.zst"] = immutable
    for name, control in names.items():
        bucket.create(name, b"")
        assert stub.objects[f"team/{name}"][3] == control


def test_http_needs_to_be_allowed_by_the_variable_of_obstore(stub, set_environment):
    set_environment({"AWS_ALLOW_HTTP": "0"})
    with pytest.raises(Unavailable):
        opened(f"s3://{BUCKET}").get(NAME, limit=10)
    assert stub.requests == []


def test_credentials_come_from_variables_and_not_from_profiles(
    stub, set_environment, tmp_path, monkeypatch
):
    """docs/command_line.md says so; a public bucket needs none."""
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(
        "[default]\naws_access_key_id = x\naws_secret_access_key = y\n"
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    set_environment({"HOME": str(tmp_path), "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1"})
    with pytest.raises(Unavailable):
        opened(f"s3://{BUCKET}").get(NAME, limit=10)
    assert stub.requests == []
    set_environment({"AWS_SKIP_SIGNATURE": "true"})
    assert opened(f"s3://{BUCKET}").get(NAME, limit=10) is None
    assert "Authorization" not in stub.requests[0][2]


@pytest.mark.parametrize("url", ["s3://", "gs:///prefix"])
def test_a_url_without_a_bucket_is_refused(url):
    pytest.importorskip("obstore")
    with pytest.raises(SettingError, match="names no bucket"):
        opened(url)


def test_without_obstore_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(JitkernError, match=re.escape('pip install "jitkern[remote]"')):
        opened("s3://kernels")


@pytest.mark.long
def test_a_fork_after_use_is_unavailable_and_one_before_is_fine(stub, run_python):
    """A call would hang for ever: the threads of obstore's runtime are in the parent."""
    done = run_python(
        "import os, signal, sys\n"
        "from jitkern.remote.opening import opened\n"
        "from jitkern.remote.store import Forked\n"
        f"store = opened('s3://{BUCKET}/team')\n"
        "def child(what):\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        signal.alarm(250)\n"
        "        try:\n"
        "            print(what, store.get('a', limit=1), flush=True)\n"
        "        except Forked as e:\n"
        "            print(what, 'unavailable:', e, flush=True)\n"
        "        try:\n"
        f"            opened('s3://{BUCKET}/other').get('a', limit=1)\n"
        "        except Forked:\n"
        "            print('a new store is, too', flush=True)\n"
        "        os._exit(0)\n"
        "    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "assert child('before') == 0\n"
        "store.get('a', limit=1)\n"
        "assert child('after') == 0\n"
        "print(store.get('a', limit=1))\n"
    )
    assert done.stdout.splitlines() == [
        "before None",
        "after unavailable: a bucket cannot be used after a fork: its threads are in the parent",
        "a new store is, too",
        "None",
    ], done.stderr


@pytest.mark.long
@pytest.mark.parametrize("count", [4, 200])
def test_processes_that_asked_just_before_their_exit_end_well(stub, count):
    """Asynchronous calls of obstore abort one process of seven there."""
    code = f"from jitkern.remote.opening import opened; assert opened('s3://{BUCKET}').get('a', limit=1) is None"
    for _ in range(0, count, 4):
        started = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(4)]
        assert [process.wait(LONGEST) for process in started] == [0] * 4


def test_a_panic_of_its_rust_code_is_an_unavailable_store(stub, bucket, monkeypatch):
    """Such an error is no Exception: it would end the program that called a kernel."""
    panic = type("PanicException", (BaseException,), {})

    def fail(*_, **__):
        raise panic("called `Option::unwrap()` on a `None` value")

    monkeypatch.setattr("obstore.get", fail)
    with pytest.raises(Unavailable, match="unwrap"):
        bucket.get(NAME, limit=10)
    monkeypatch.setattr("obstore.get", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        bucket.get(NAME, limit=10)
