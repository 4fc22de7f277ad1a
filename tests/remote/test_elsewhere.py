"""What reads a remote, or carries a bundle, without any part of ours: a web server, and a registry of images."""

import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import servers
from helpers import REPOSITORY
from stocked import CPU, everything, names

from jitkern.errors import SettingError
from jitkern.remote import layout, publish, pull
from jitkern.remote.opening import opened
from jitkern.remote.store import Object, Unavailable

HERE = f"{CPU}-linux_x86_64"
pytestmark = pytest.mark.conformance


class Web:
    """The least that reads a web server: where this jitkern has no store for https."""

    def __init__(self, url):
        self.url = url

    def get(self, name, *, limit, unless=None):
        try:
            with urllib.request.urlopen(f"{self.url}/{name}", timeout=250) as answer:
                if int(answer.headers["Content-Length"]) > limit:
                    raise Unavailable("too large")
                return Object(answer.read(), answer.headers.get("ETag"))
        except urllib.error.HTTPError as e:
            if e.code == 404:
                return None
            raise Unavailable(str(e)) from e


def reader(url):
    try:
        return opened(url)
    except SettingError:
        return Web(url)


def test_a_web_server_serves_what_was_pushed_into_a_directory(
    tmp_path, directory, full, empty, key, public
):
    publish.push(full, everything(full), directory, key=key)
    tmp_path.chmod(0o755)
    (tmp_path / "nginx").mkdir()
    with servers.nginx(tmp_path / "nginx", directory.root) as url:
        store = reader(url)
        assert store.get("v1/none/index.json", limit=100) is None
        assert store.get(layout.ROOT, limit=100).data == layout.ROOT_CONTENT
        with pytest.raises(Unavailable):
            store.get(layout.ROOT, limit=3)
        done = pull.pull(empty, store, [HERE], (public,))
        assert (done.new, done.failed) == (4, ())
    assert names(empty) == names(full)


def test_a_registry_of_images_carries_a_bundle_as_the_guide_says(tmp_path, cache_dir, full):
    """docs/shipping.md: `cache pack` and `oras push`. The client is oras-py, whose command is a few lines of it."""
    pytest.importorskip("oras", reason='oras is not installed: pip install -e ".[conformance]"')
    guide = (REPOSITORY / "docs" / "shipping.md").read_text()
    blocks = re.findall(r"^```sh\n(.*?)^```", guide, re.MULTILINE | re.DOTALL)
    (script,) = [block for block in blocks if "oras push" in block]
    removal = "rm kernels.tar.zst\n"
    assert removal in script
    script = script.replace(removal, f"{removal}jitkern cache clear --yes\n")  # the other machine
    Path(cache_dir).parent.mkdir(exist_ok=True)
    os.rename(full.root, cache_dir)
    before = names(type(full)(cache_dir))
    oras = tmp_path / "client_of_oras.py"
    oras.write_text(ORAS)
    programs = f'jitkern() {{ {sys.executable} -W ignore -m jitkern "$@"; }}; oras() {{ {sys.executable} -W ignore {oras} "$@"; }}\n'
    (tmp_path / "registry").mkdir()
    (tmp_path / "work").mkdir()
    with servers.registry(tmp_path / "registry") as host:
        script = script.replace("registry.example", host)
        done = subprocess.run(
            ["/bin/sh", "-ec", programs + script], cwd=tmp_path / "work", capture_output=True, text=True, check=False,
            env={**os.environ, "JITKERN_CACHE_DIR": str(cache_dir), "TAG": "1"}, timeout=300,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 entries unpacked" in done.stderr
    assert names(type(full)(cache_dir)) == before


ORAS = """
import sys
import oras.client
client = oras.client.OrasClient(insecure=True)
verb, target, *files = sys.argv[1:]
if verb == "push":
    client.push(target=target, files=files, disable_path_validation=True)
else:
    print(*client.pull(target=target, outdir="."))
"""
