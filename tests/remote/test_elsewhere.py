"""What carries a bundle without any part of ours: a registry of images."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import servers
from helpers import REPOSITORY
from stocked import names

pytestmark = pytest.mark.conformance


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
