"""A Slurm of one node, which is this machine, for tests. `apt-get install slurm-wlm munge`; needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from helpers import LONGEST

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun")
PATH = f"{os.environ['PATH']}:/usr/sbin"
CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
NodeName={host} NodeAddr=127.0.0.1 CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def lacking() -> str:
    """Why there can be no Slurm here, or ""."""
    absent = [name for name in PROGRAMS if not shutil.which(name, path=PATH)]
    if absent:
        return f"needs {', '.join(absent)}: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "needs root, to start slurmd"


@contextlib.contextmanager
def slurm() -> Iterator[dict[str, str]]:
    """A running Slurm; yields the variables by which its commands find it."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short, for the path of a socket
    folder.chmod(0o755)
    (folder / "state").mkdir()
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    with socket.socket() as one, socket.socket() as two:
        one.bind(("127.0.0.1", 0))
        two.bind(("127.0.0.1", 0))
        ports = (one.getsockname()[1], two.getsockname()[1])
    configuration = CONFIGURATION.format(host=socket.gethostname(), folder=folder, ports=ports)
    (folder / "slurm.conf").write_text(configuration)
    environment = {**os.environ, "PATH": PATH, "SLURM_CONF": str(folder / "slurm.conf")}
    of_munge = [
        f"--{name}={folder}/{file}"
        for name, file in (
            ("socket", "munge.socket"), ("pid-file", "munged.pid"), ("log-file", "munged.log"),
            ("seed-file", "munged.seed"), ("key-file", "munge.key"),
        )
    ]  # fmt: skip
    with (folder / "log").open("w") as log, contextlib.ExitStack() as started:
        started.callback(shutil.rmtree, folder, ignore_errors=True)
        for command in (["munged", "--force", "--foreground", *of_munge], ["slurmctld", "-D"], ["slurmd", "-D"]):  # fmt: skip
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            started.callback(process.wait, 30)
            started.callback(process.terminate)
            time.sleep(0.5)
        deadline = time.monotonic() + LONGEST
        while True:
            state = subprocess.run(
                ["sinfo", "--noheader", "--format=%t"], env=environment, capture_output=True, text=True, check=False,
            ).stdout  # fmt: skip
            if state.strip() == "idle":
                break
            if time.monotonic() > deadline:
                raise RuntimeError(f"Slurm does not start: {state}\n{(folder / 'log').read_text()}")
            time.sleep(0.2)
        yield {"SLURM_CONF": environment["SLURM_CONF"]}
