"""Machines with empty caches, on each of which whole processes run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import processes
from helpers import COUNTED_CALLS
from web_servers import settings_file

PATIENT = """
from jitkern.jit import download
download.expected = lambda *_: float("inf")  # seconds of a compile, of which a miss may take half
"""
CALLS = COUNTED_CALLS.format(before=PATIENT)


class Machine:
    """A place with an empty cache, whose settings file trusts a remote."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        folder.mkdir(mode=0o700, parents=True)
        (folder / "run").mkdir(mode=0o700)
        config = settings_file(folder, trusted_remotes=[url])
        self.environment = {
            **os.environ, "JITKERN_CACHE_DIR": str(folder / "cache"), "JITKERN_REMOTE": url,
            "XDG_CONFIG_HOME": str(config), "XDG_RUNTIME_DIR": str(folder / "run"),
        }  # fmt: skip

    def start(self, code=CALLS, **environment):
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", code], cwd=self.folder,
            env={**self.environment, **environment}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, code=CALLS, **environment):
        done = processes.run(
            [sys.executable, "-W", "ignore", "-c", code], cwd=self.folder,
            env={**self.environment, **environment}, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1]), done.stderr
