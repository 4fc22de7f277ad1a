"""`jitkern serve`: a process of its own, its start, its end, and a machine without a toolchain."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from clients import HERE, MACHINE, VEC_ADD, Client, asked, line, tensor
from helpers import LONGEST, REPOSITORY, until
from served import end, serving

from jitkern.remote.index import Index


def jitkern(*arguments, cwd, **environment):
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], cwd=cwd, env={**os.environ, **environment},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_builds_end_and_leaves_no_process_behind(tmp_path, number):
    slow = tmp_path / "slow"
    (slow / "slowpkg").mkdir(parents=True)
    (slow / "slowpkg" / "__init__.py").write_text(SLOW)
    (slow / "slowpkg" / "slow.cpp").write_text(SOURCE)
    with serving("slowpkg", "-v", cwd=slow, GATE=str(tmp_path / "gate")) as (process, url):
        client = Client(url)
        client.connection.connect()
        body = asked(line("slowpkg::slow", tensor(8)))
        head = f"POST /v1/build HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        client.connection.sock.sendall(head.encode() + body)
        until((tmp_path / "gate.begun").exists, of=[process])
        process.send_signal(number)

        def refuses():
            try:
                Client(url).get("/healthz")
            except ConnectionError:
                return True

        until(refuses)
        (tmp_path / "gate").touch()
        answer = client.connection.sock.recv(100)
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        _, err = process.communicate(timeout=LONGEST)
        assert (process.returncode, "POST /v1/build" in err) == (0, True), err
    assert not [p for p in children_named("slowpkg") if p != os.getpid()]


SOURCE = 'extern "C" void slow(T *out, const T *x, long n) { for (long i = 0; i < n; i++) out[i] = x[i]; }\n'
SLOW = """
import os, pathlib, time
import torch
from jitkern.declare import Cpp, kernel

slow = kernel("slowpkg::slow(Tensor x) -> Tensor", cpu=Cpp("slow.cpp"))

@slow.launch("cpu")
def _(k, x):
    out = torch.empty_like(x)
    k.slow[{"T": x.dtype}](out, x, x.numel())
    return out

@slow.samples
def _(device):
    yield torch.ones(8, device=device)

from jitkern.service import builds
real = builds.prewarm

def waiting(*args, **kwargs):
    gate = pathlib.Path(os.environ["GATE"])
    gate.with_suffix(".begun").touch()
    while not gate.exists():
        time.sleep(0.02)
    return real(*args, **kwargs)

builds.prewarm = waiting
"""


def children_named(text):
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if text in (path / "cmdline").read_text().split("\0"):
                yield int(path.name)


@pytest.mark.long
def test_it_serves_what_prewarm_built_and_warns_of_what_it_lacks(tmp_path, cli):
    assert cli("prewarm", "vec_add", "--call", "f32[8], f32[8]")[0] == 0
    with serving("vec_add", cwd=tmp_path, host="0.0.0.0") as (process, url):
        client = Client(url)
        index = Index.decode(client.get(f"/v1/{MACHINE}/index.json").body)
        assert sum(len(bundle.entries) for bundle in index.bundles) == 3
        assert client.build(VEC_ADD.replace("vec_add", "softmax")).status == 404
        code, err = end(process, signal.SIGINT)
    assert (code, err.count("entries are not signed")) == (0, 1)
    assert err.count("--token-file FILE requires a token") == 1


@pytest.mark.long
def test_a_token_comes_from_a_file(tmp_path):
    (tmp_path / "token").write_text("  secret\n")
    arguments = ("vec_add", "-q", "--token-file", "token")
    with serving(*arguments, cwd=tmp_path) as (process, url):
        client = Client(url)
        assert client.build(VEC_ADD).status == 401
        assert client.build(VEC_ADD, [HERE], Authorization="Bearer secret").status == 200
        assert end(process, signal.SIGTERM) == (0, "")


@pytest.mark.usefixtures("signing_package")
@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "the following arguments are required: PACKAGE"),
        (("no_such_package",), 2, "`no_such_package` is not an op, a namespace or a package"),
        (("vec_add", "--listen", "nowhere"), 2, "`nowhere` is not HOST:PORT"),
        (("vec_add", "--listen", "127.0.0.1:99999"), 2, "is not HOST:PORT"),
        (("vec_add", "--listen", ":80"), 2, "is not HOST:PORT"),
        (("vec_add", "--jobs", "0"), 2, "`0` is not a number from 1 up"),
        (("vec_add", "--jbos", "1"), 2, "did you mean --jobs?"),
        (("vec_add", "--token-file", "missing"), 2, "--token-file missing cannot be read: No such"),
        (("vec_add", "--token-file", "empty"), 2, "empty holds no token: expected one line"),
        (("vec_add", "--token-file", "lines"), 2, "lines holds no token: expected one line"),
        (("vec_add", "--key", "missing"), 2, "argument --key: there is no file missing"),
        (("vec_add", "--key", "open"), 1, "is open to other users"),
        (("broken_package",), 1, "not serving, since broken_package cannot be imported"),
    ],
    ids=range(13),
)  # fmt: skip
def test_a_start_that_fails_says_why(cli, tmp_path, monkeypatch, arguments, code, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").touch()
    (tmp_path / "lines").write_text("a\nb\n")
    (tmp_path / "open").write_text("key")
    (tmp_path / "open").chmod(0o644)
    (tmp_path / "broken_package.py").write_text("raise ValueError('no')\n")
    done, _, err = cli("serve", *arguments)
    assert (done, says in " ".join(err.split())) == (code, True), err


@pytest.mark.usefixtures("signing_package")
@pytest.mark.long
def test_what_cron_runs_pushes_what_was_built(tmp_path, cli):
    assert cli("cache", "keygen", str(tmp_path / "key"))[0] == 0
    bucket = (tmp_path / "bucket").as_uri()
    page = (REPOSITORY / "docs" / "shipping.md").read_text()
    command = re.search(r"^\*/10 .* \S+/jitkern (remote push .*)", page, re.MULTILINE)[1].split()
    command[command.index("--to") + 1] = bucket
    command[command.index("--key") + 1] = str(tmp_path / "key")
    with serving("vec_add", "--key", str(tmp_path / "key"), cwd=tmp_path) as (process, url):
        assert Client(url).build(VEC_ADD).status == 200
        for _ in range(2):
            done = jitkern("-m", "jitkern", *command, cwd=tmp_path)
            assert done.returncode == 0, done.stderr
        assert end(process, signal.SIGTERM)[0] == 0
    index = Index.decode((tmp_path / "bucket" / "v1" / MACHINE / "index.json").read_bytes())
    assert sum(len(bundle.entries) for bundle in index.bundles) == 3
    settings = tmp_path / "settings" / "jitkern"
    settings.mkdir(parents=True)
    public = (tmp_path / "key.pub").read_text().strip()
    (settings / "config.toml").write_text(f'trusted_keys = ["{public}"]\n')
    done = jitkern(
        "-m", "jitkern", "remote", "pull", "--from", bucket, cwd=tmp_path,
        XDG_CONFIG_HOME=str(settings.parent), JITKERN_CACHE_DIR=str(tmp_path / "other"),
    )  # fmt: skip
    assert (done.returncode, "3 entries added" in done.stderr) == (0, True), done.stderr


@pytest.mark.parametrize("package", ["starlette", "uvicorn", "prometheus_client"])
def test_without_its_packages_it_names_the_extra(run_python, package):
    code = f"import sys\nsys.modules['{package}'] = None\nfrom jitkern.cli import main\nsys.exit(main(['serve', 'vec_add']))"
    done = run_python(code)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    says = rf'`jitkern serve` needs {package}\S*: pip install "jitkern\[serve\]"'
    assert re.search(says, done.stderr)


def test_only_the_service_imports_its_packages():
    packages = "starlette|uvicorn|prometheus_client"
    imports = re.compile(rf"^ *(?:from|import) (?:{packages})\b", re.MULTILINE)
    found = {
        path.relative_to(REPOSITORY).parts[:2]
        for folder in ("jitkern", "cache_tools", "kernels_src")
        for path in (REPOSITORY / folder).rglob("*.py")
        if imports.search(path.read_text())
    }
    assert found == {("jitkern", "service")}


def test_an_address_in_use_is_named(cli):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        code, _, err = cli("serve", "vec_add", "--listen", address)
    assert code == 1
    assert f"cannot listen on {address}: Address already in use; name another address" in err


def test_an_unusable_cache_ends_with_3(cli, tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    where = ("--listen", "127.0.0.1:0", "--cache-dir", str(tmp_path / "shared"))
    code, _, err = cli("serve", "vec_add", *where)
    assert (code, "is not trusted" in err) == (3, True), err
