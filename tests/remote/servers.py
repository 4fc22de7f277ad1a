"""The servers that remotes are tested against, as far as they are installed: CONTRIBUTING.md says how.

A server is started once for a run of the tests; every test has a prefix of its own in it.
"""

import base64
import contextlib
import hashlib
import hmac
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import LONGEST, REPOSITORY

BIN = Path(sys.executable).parent
AZURE_ACCOUNT = "devstoreaccount1"  # Azurite's own, with its published key
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
BUCKET = "kernels"


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def program(name: str, install: str) -> str:
    """The path of a program; the test is skipped, and says how to install it, where it is missing."""
    found = next(
        (str(p) for p in (BIN / name, REPOSITORY / "node_modules" / ".bin" / name) if p.exists()),
        None,
    ) or shutil.which(name)
    if not found:
        pytest.skip(f"{name} is not installed: {install}")
    return str(Path(found).absolute())


@contextlib.contextmanager
def started(command: list[str], port: int, folder: Path) -> Iterator[None]:
    """Run a server until the block ends. Fails where it does not listen in time."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, cwd=folder, start_new_session=True
        )
    try:
        end = time.monotonic() + LONGEST
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
                break
            text = (folder / "log").read_text(errors="replace")[-2000:]
            assert process.poll() is None, f"{command[0]} ended: {text}"
            assert time.monotonic() < end, f"{command[0]} does not listen: {text}"
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextlib.contextmanager
def moto(folder: Path) -> Iterator[dict[str, str]]:
    """An S3 with the bucket `kernels`; yields the variables by which it is found."""
    command, port = program("moto_server", 'pip install -e ".[conformance]"'), free_port()
    with started([command, "-H", "127.0.0.1", "-p", str(port)], port, folder):
        url = f"http://127.0.0.1:{port}"
        with urllib.request.urlopen(urllib.request.Request(f"{url}/{BUCKET}", method="PUT")):
            pass
        yield {
            "AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        }  # fmt: skip


@contextlib.contextmanager
def azurite(folder: Path) -> Iterator[dict[str, str]]:
    """An Azure with the container `kernels`; without --disableTelemetry it would call out."""
    command, port = program("azurite-blob", "npm install azurite"), free_port()
    options = ["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"]
    where = ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    with started([command, *options, *where], port, folder):
        url = f"http://127.0.0.1:{port}/{AZURE_ACCOUNT}"
        _make_container(url)
        yield {
            "AZURE_STORAGE_ENDPOINT": url, "AZURE_ALLOW_HTTP": "true",
            "AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY,
        }  # fmt: skip


def _make_container(url: str) -> None:
    date = time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime())
    version = "2021-08-06"
    text = (
        "PUT"
        + "\n" * 12
        + f"x-ms-date:{date}\nx-ms-version:{version}\n/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{BUCKET}\nrestype:container"
    )
    mac = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers = {
        "x-ms-date": date, "x-ms-version": version, "Content-Length": "0",
        "Authorization": f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(mac).decode()}",
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/{BUCKET}?restype=container", method="PUT", headers=headers
    )
    with urllib.request.urlopen(request):
        pass


@contextlib.contextmanager
def nginx(folder: Path, root: Path, site: str = "") -> Iterator[str]:
    """A web server of the files in a directory, or of a site; yields its URL.

    Whatever port the site listens on, the server listens on a free one.
    """
    command, port = program("nginx", "apt-get install nginx"), free_port()
    places = " ".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    site = site or f"server {{ listen 80; root {root}; }}"
    here = re.sub(r"\blisten \d+", f"listen 127.0.0.1:{port}", site)
    (folder / "site.conf").write_text(here)
    (folder / "nginx.conf").write_text(
        f"pid {folder}/pid; error_log {folder}/error.log; daemon off; worker_processes 1; events {{}}\n"
        f"{'user root;' if os.geteuid() == 0 else ''}\n"
        f"http {{ access_log off; {places} include {folder}/site.conf; }}\n"
    )
    with started([command, "-p", str(folder), "-c", str(folder / "nginx.conf")], port, folder):
        yield f"http://127.0.0.1:{port}"


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """A registry of container images; yields its host and port."""
    command, port = program("docker-registry", "apt-get install docker-registry"), free_port()
    config = folder / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\n"
        f'http: {{addr: "127.0.0.1:{port}"}}\nlog: {{level: error, accesslog: {{disabled: true}}}}\n'
    )
    with started([command, "serve", str(config)], port, folder):
        yield f"127.0.0.1:{port}"
