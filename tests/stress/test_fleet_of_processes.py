"""64 processes with empty caches want one op at the same time, from one remote over a slow network."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

import jitkern.ops  # noqa: F401  announces the ops
from benches.fleet import static
from benches.serve import serving
from benches.slow_network import SlowNetwork
from jitkern import cache_tools, config
from jitkern.cache.store import Cache
from jitkern.prewarming.api import prewarm
from jitkern.remote import publish
from jitkern.remote.stores.directory import DirectoryStore
from jitkern.target import Target

# The network of the test cuts connections, whose streams Python then calls unclosed.
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
HOSTS = 64
LONGEST = 600  # seconds, after which a process hangs
FLEET = """
import json, os, sys, time, torch, jitkern
home, hosts = sys.argv[1], int(sys.argv[2])
x = torch.randn(64, 100)
start = time.time() + 1
children = []
for host in range(hosts):
    child = os.fork()
    if child:
        children.append(child)
        continue
    here = os.path.join(home, str(host))
    os.makedirs(here + "/run", mode=0o700)
    os.environ.update(JITKERN_CACHE_DIR=here + "/cache", XDG_RUNTIME_DIR=here + "/run")
    time.sleep(max(0, start - time.time()))
    begin = time.monotonic()
    try:
        import jitkern.ops
        right = torch.allclose(jitkern.ops.softmax(x), torch.softmax(x, -1), atol=1e-6)
        said = ""
    except BaseException as e:
        right, said = False, repr(e)
    counts = jitkern.stats()
    line = {"right": right, "said": said, "compiles": counts["compiles"], "seconds": time.monotonic() - begin}
    with open(home + "/lines", "a") as file:
        file.write(json.dumps(line) + "\\n")
    os._exit(0)
for child in children:
    os.waitpid(child, 0)
"""


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A folder with bundles of all shipped ops for this machine's CPU."""
    home = tmp_path_factory.mktemp("filled")
    with config.using(cache_dir=home / "cache"):
        prewarm(["jitkern"], [Target.current("cpu")])
        cache = Cache(home / "cache")
        chosen = cache_tools.chosen(cache, cache_tools.EntryFilter())
        store = DirectoryStore((home / "remote").as_uri())
        publish.push(cache, chosen, store, unsigned=True)
    return home / "remote"


def fleet(
    home: Path, network: SlowNetwork, *, compiling: str, hosts=HOSTS, during=lambda: None
) -> list[dict]:
    """What each process of the fleet found. during: called while the processes run."""
    url = f"http://127.0.0.1:{network.port}"
    (home / "jitkern").mkdir(parents=True)
    (home / "jitkern" / "config.toml").write_text(f'trusted_remotes = ["{url}"]\n')
    environment = {
        "PATH": "/usr/bin:/bin", "XDG_CONFIG_HOME": str(home), "JITKERN_REMOTE": url,
        "JITKERN_COMPILE": compiling, "HOME": str(home),
    }  # fmt: skip
    if compiling == "never":
        environment |= {"JITKERN_REMOTE_TIMEOUT": "600", "JITKERN_REMOTE_BUDGET": "600"}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FLEET, str(home), str(hosts)], env=environment
    )
    try:
        during()
        assert process.wait(LONGEST) == 0
    finally:
        process.kill()
    found = [json.loads(line) for line in (home / "lines").read_text().splitlines()]
    assert len(found) == hosts
    assert all(host["right"] for host in found), [host["said"] for host in found if host["said"]]
    return found


def test_with_a_filled_remote_nothing_compiles(filled, tmp_path):
    with static(filled) as to, SlowNetwork(to, delay=0.025) as network:
        found = fleet(tmp_path, network, compiling="never")
        assert network.requests <= 4 * HOSTS
    assert not any(host["compiles"] for host in found)


def test_a_service_builds_once_for_all(tmp_path):
    with serving(tmp_path / "service") as url:
        to = ("127.0.0.1", int(url.rpartition(":")[2]))
        with SlowNetwork(to, delay=0.025) as network:
            found = fleet(tmp_path / "fleet", network, compiling="never")
        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    assert not any(host["compiles"] for host in found)
    assert builds(metrics) == 1


def test_failing_requests_cost_compiles_and_nothing_else(filled, tmp_path):
    with static(filled) as to, SlowNetwork(to, delay=0.025, failing=0.3) as network:
        fleet(tmp_path, network, compiling="auto")
        assert network.failures > HOSTS / 8


def test_a_service_whose_answers_get_lost_builds_once(tmp_path):
    with serving(tmp_path / "service") as url:
        to = ("127.0.0.1", int(url.rpartition(":")[2]))
        with SlowNetwork(to, delay=0.025, failing=0.3, kinds=("lost",)) as network:
            fleet(tmp_path / "fleet", network, compiling="auto")
            assert network.failures > HOSTS / 8
        # On a slow machine all may have compiled before one asked for a build; this process does.
        with SlowNetwork(to, delay=0.025) as network:
            fleet(tmp_path / "after", network, compiling="never", hosts=1)
        metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
    assert builds(metrics) == 1


@pytest.mark.parametrize("after", [0.02, 0.3, 2.0])
def test_a_service_that_is_killed_costs_compiles_alone(after, tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "jitkern", "serve", "jitkern", "-q"]
    service = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0"], stdout=subprocess.PIPE, text=True,
        start_new_session=True, env={**os.environ, "JITKERN_CACHE_DIR": str(tmp_path / "service")},
    )  # fmt: skip
    port = int(re.search(r":(\d+)", service.stdout.readline().partition("//")[2])[1])

    with service, SlowNetwork(("127.0.0.1", port), delay=0.025) as network:

        def kill():
            while not network.requests:
                time.sleep(0.01)
            time.sleep(after)
            os.killpg(service.pid, signal.SIGKILL)

        fleet(tmp_path / "fleet", network, compiling="auto", during=kill)


def builds(metrics: str) -> int:
    counts = re.findall(r"^jitkern_serve_builds_total\S* (\S+)", metrics, re.MULTILINE)
    return int(sum(map(float, counts)))
