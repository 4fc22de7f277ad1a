"""A process that has imported Torch, and forks itself for each process that a test starts.

An import of Torch takes 2 s of one core. A child begins as a fresh process does, but with Torch
(and nothing of jitkern) imported: with its own environment, folder, output and `__main__`. It ends
without freeing all that was imported, which would take longer than the rest of most tests.

python -W ignore tests/torch_server.py SOCKET
"""

import atexit
import contextlib
import gc
import json
import os
import runpy
import socket
import sys
import threading
import types

import torch  # noqa: F401  what this process is for


def serve(listener: socket.socket) -> tuple[list[str], dict[str, str]]:
    """Fork a child for each connection; returns in each child, the command and its environment."""
    while True:
        connection, _ = listener.accept()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        data, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 4)
        if not data or os.fork():
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)
            continue
        child = os.fork()
        if child:  # waits in the child's place, since a process may wait for its own alone
            for descriptor in descriptors:
                os.close(descriptor)
            connection.sendall(f"{child}\n".encode())
            _, status = os.waitpid(child, 0)
            with contextlib.suppress(OSError):
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            os._exit(0)
        listener.close()
        connection.close()
        for standard, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, standard)
        os.fchdir(descriptors[3])
        for descriptor in descriptors:
            os.close(descriptor)
        with os.fdopen(os.open(json.loads(data), os.O_RDONLY)) as file:
            command, environment = json.load(file)
        return command, environment


def become(command: list[str], environment: dict[str, str]) -> None:
    """Do what `python -c code …` or `python -m module …` does."""
    sys.dont_write_bytecode = True  # a file that a test edits twice in a second would be stale
    os.environ.clear()
    os.environ.update(environment)
    kind, what, *rest = command
    sys.path[0] = "" if kind == "-c" else os.getcwd()
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.argv = [kind, *rest]
    if kind == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(what, "<string>", "exec"), vars(main))  # noqa: S102
    except Exception as e:  # noqa: BLE001  without the lines of this file
        traceback = e.__traceback__
        sys.excepthook(type(e), e.with_traceback(traceback and traceback.tb_next), e.__traceback__)
        sys.exit(1)


if __name__ == "__main__":
    gc.freeze()  # a collection would copy the pages that a child shares with this process
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(sys.argv[1])
        bound.listen(64)
        asked = serve(bound)
    code: object = 0
    try:
        become(*asked)
    except SystemExit as e:
        code = e.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    background = sys.modules.get("jitkern.config.background")
    if background and background.PATIENCE == 5.0:  # unless a test set it: a busy machine is slow
        background.PATIENCE = 250.0
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code or 0))
