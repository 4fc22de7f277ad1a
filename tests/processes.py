"""Python processes that tests start: forked from one that has imported Torch, see torch_server.py."""

import atexit
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# Variables that Python, Torch and their libraries read before the code of a test runs.
EARLY = ("PYTHON", "LD_", "OMP_", "MKL_", "GOMP_", "TORCH", "CUDA", "MALLOC", "GLIBC", "NVIDIA")


def run(
    command: Sequence[str],
    *,
    cwd: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float | None = None,
    check: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Do what `subprocess.run` does, with text captured, for `[sys.executable, "-W", "ignore", …]`.

    A process of Python code (`-c`) or a module (`-m`) is forked from one that has imported Torch.
    """
    environment = {**os.environ} if env is None else dict(env)
    command = [*map(str, command)]
    if command[:3] != [sys.executable, "-W", "ignore"] or command[3] not in ("-c", "-m"):
        raise ValueError(f"{command[:4]} is not a command for a forked process")
    if early(environment) != early(dict(os.environ)) or not hasattr(os, "fork"):
        return subprocess.run(
            command, cwd=cwd, env=environment, timeout=timeout, check=check, capture_output=True,
            text=True, errors="replace",
        )  # fmt: skip
    code, out, err = _forked(command[3:], cwd or os.getcwd(), environment, timeout)
    done = subprocess.CompletedProcess(command, code, out, err)
    if check:
        done.check_returncode()
    return done


def early(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a forked process would read too late."""
    return {k: v for k, v in environment.items() if k.startswith(EARLY) and k != "PYTHONPATH"}


def _forked(
    command: list[str],
    cwd: str | os.PathLike[str],
    environment: dict[str, str],
    timeout: float | None,
) -> tuple[int, str, str]:
    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as connection:
        asked, out, err = (Path(name) / part for part in ("asked", "out", "err"))
        asked.write_text(json.dumps([command, environment]))
        connection.connect(_server())
        connection.settimeout(timeout)
        with open(os.devnull) as nothing, out.open("wb") as o, err.open("wb") as e:
            folder = os.open(cwd, os.O_RDONLY)
            try:
                files = [nothing.fileno(), o.fileno(), e.fileno(), folder]
                socket.send_fds(connection, [json.dumps(str(asked)).encode()], files)
            finally:
                os.close(folder)
        with connection.makefile() as answer:
            child = int(answer.readline())
            try:
                code = int(answer.readline())
            except TimeoutError:
                os.kill(child, signal.SIGKILL)
                raise subprocess.TimeoutExpired(command, timeout or 0) from None
        return code, out.read_text(errors="replace"), err.read_text(errors="replace")


_starting = threading.Lock()


def _server() -> str:
    with _starting:
        return _started(os.getpid())


@functools.cache
def _started(_process: int) -> str:
    """Start the server of this process, and return its socket."""
    folder = tempfile.mkdtemp(prefix="jitkern-torch-")
    path = f"{folder}/socket"
    script = str(Path(__file__).with_name("torch_server.py"))
    server = subprocess.Popen([sys.executable, "-W", "ignore", script, path], cwd=folder)

    def end() -> None:
        server.kill()
        server.wait()
        shutil.rmtree(folder, ignore_errors=True)

    atexit.register(end)
    while server.poll() is None:
        with socket.socket(socket.AF_UNIX) as trial:
            if trial.connect_ex(path) == 0:
                return path
        time.sleep(0.02)
    raise RuntimeError("the process that imports Torch ended")
