"""`jitkern serve` in a process of its own, none of whose deadlines comes on a busy machine."""

import contextlib
import os
import re
import subprocess
import sys

from helpers import LONGEST, PATIENT_SERVICE


@contextlib.contextmanager
def serving(*arguments, cwd, host="127.0.0.1", **environment):
    """The process of a service, and its URL."""
    command = [sys.executable, "-W", "ignore", "-c", PATIENT_SERVICE, *arguments]
    process = subprocess.Popen(
        [*command, "--listen", f"{host}:0"], cwd=cwd, env={**os.environ, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        first = process.stdout.readline()
        found = re.search(r"http://\S+:\d+", first)
        assert found, (first, process.stderr.read())
        yield process, found[0]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def end(process, number):
    process.send_signal(number)
    _, err = process.communicate(timeout=LONGEST)
    return process.returncode, err
