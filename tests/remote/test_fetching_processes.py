"""Whole processes with a remote or a service: cold, warm, many at once, forked, and at their end."""

import json
import re
import signal

import pytest
from machines import PATIENT, Machine
from served import end, serving
from web_servers import Server, fill, static

from jitkern.cache.store import Cache
from jitkern.runtime import binding

# The network of the test cuts connections, whose streams Python then calls unclosed.
pytestmark = [
    pytest.mark.skipif(not binding.runtime(), reason="no launch runtime on this platform"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def remote(tmp_path_factory):
    """The folder of a remote with all that the calls need."""
    folder = tmp_path_factory.mktemp("filled")
    builder = Machine(folder / "builder", "https://nobody.invalid")
    builder.environment["JITKERN_OFFLINE"] = "1"
    for _ in range(2):
        found, _ = builder.run()
    assert found["stats"]["compiles"] == 0 and not found["misses"]
    fill(Cache(folder / "builder" / "cache"), folder / "remote", suffix=".tar.zst")
    return folder / "remote"


@pytest.mark.long
@pytest.mark.parametrize(
    "environment",
    [
        {"JITKERN_COMPILE": "never", "PATH": ""},
        {"CC": "/nonexistent", "CXX": "/nonexistent", "PATH": ""},
    ],
    ids=["never", "no compiler"],
)
def test_a_cold_process_compiles_nothing_and_is_served_by_c(tmp_path, remote, environment):
    with Server(static(remote)) as server:
        machine = Machine(tmp_path / "node", server.url)
        found, stderr = machine.run(**environment)
        assert not found["stats"]["compiles"] and not found["stats"]["runtimes"], stderr
        assert found["stats"]["fetched"] >= 1
        assert (found["loaded"], found["misses"]) == (True, 0), stderr
        assert len(server.requests) == 2  # the index and one bundle
        assert stderr == ""
        found, _ = machine.run(**environment)
        assert (found["sockets"], found["imported"]) == ([], [])
        assert len(server.requests) == 2
        assert not found["misses"] and not found["stats"]["fetched"]


@pytest.mark.long
def test_a_plan_that_comes_with_the_kernels_spares_the_trace(tmp_path, remote):
    with Server(static(remote)) as server:
        machine = Machine(tmp_path / "node", server.url)
        found, stderr = machine.run(
            "import json, torch, jitkern.ops\n"
            f"from jitkern.runtime import specializer, programs\n{PATIENT}"
            "specializer.trace = None  # would be an error\n"
            "x = torch.ones(4)\n"
            "jitkern.ops.vec_add(x, x); specializer.settle()\n"
            "before = sum(s.misses for s in programs.SLOTS)\n"
            "jitkern.ops.vec_add(x, x)\n"
            "print(json.dumps(sum(s.misses for s in programs.SLOTS) - before))\n",
            JITKERN_LOG="info",
        )
    assert found == 0 and "NoneType" not in stderr, stderr


@pytest.mark.long
def test_processes_with_one_cache_fetch_a_bundle_once(tmp_path, remote):
    with Server(static(remote)) as server:
        machine = Machine(tmp_path / "node", server.url)
        processes = [machine.start() for _ in range(8)]
        for process in processes:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err
            found = json.loads(out.splitlines()[-1])
            assert not found["stats"]["compiles"] and not found["stats"]["runtimes"]
        assert sum(path.endswith(".zst") for path in server.paths) == 1


@pytest.mark.long
def test_a_store_that_is_unusable_after_a_fork_costs_no_wait(tmp_path):
    """As the contract says of stores with threads of their own: no retry, and no failure of the remote."""
    found, stderr = Machine(tmp_path / "node", "file:///nowhere").run(
        "import json, os, time\n"
        "from jitkern import config\n"
        "from jitkern.cache.key import Key\n"
        "from jitkern.cache.store import Cache\n"
        "from jitkern.remote import fetch\n"
        "from jitkern.remote.store import Forked\n"
        "url, = config.current().remotes\n"
        "remote, asked = fetch.remote_of(url), []\n"
        "class Threads:\n"
        "    url, pid = 'x', os.getpid()\n"
        "    def get(self, name, *, limit, unless=None):\n"
        "        asked.append(name)\n"
        "        if os.getpid() != self.pid: raise Forked('used before a fork')\n"
        "fetch.opened = lambda given: Threads()\n"
        "target = 'cpu-x86_64-torch2.13.0-linux_x86_64'\n"
        "def miss(n):\n"
        "    key = Key({'op': 'a::b', 'target': target}, f'{n:064x}', 'b')\n"
        "    return fetch.fetch(fetch.Miss(Cache.open(config.current()), key, 1.0))\n"
        "assert 'no such entry' in miss(1)\n"
        "remote.indexes.clear(); asked.clear()\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    said = [miss(n) for n in range(2, 12)]\n"
        "    print(json.dumps([said, len(asked), remote.cooldown.left()]), flush=True)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    said, asked, resting = found
    assert set(said) == {"x: used before a fork"} or all("fork" in text for text in said)
    assert (asked, resting) == (10, "")
    assert len(stderr.splitlines()) == 1


ENDING = f"""
import torch, jitkern.ops
{PATIENT}
x = torch.ones(4)
jitkern.ops.vec_add(x, x)
"""


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 200])
def test_processes_that_end_right_after_a_fetch_end_well(tmp_path, remote, count):
    with Server(static(remote)) as server:
        for first in range(0, count, 4):
            machines = [
                Machine(tmp_path / f"node{first + n}", server.url)
                for n in range(min(4, count - first))
            ]
            for process in [machine.start(ENDING) for machine in machines]:
                _, err = process.communicate(timeout=300)
                assert (process.returncode, err) == (0, "")


BARE = {
    "PATH": "", "CC": "/nonexistent", "CXX": "/nonexistent",
    "JITKERN_COMPILE": "never", "JITKERN_FALLBACK": "raise",
}  # fmt: skip


@pytest.mark.long
def test_a_machine_has_it_built_and_the_next_gets_the_bundle(tmp_path):
    """The service has an empty cache; both machines compute by C in their first process."""
    here = {"JITKERN_CACHE_DIR": str(tmp_path / "service"), "PYTHONUNBUFFERED": "1"}
    with serving("jitkern::vec_add", "-v", cwd=tmp_path, **here) as (process, url):
        for machine in (Machine(tmp_path / "first", url), Machine(tmp_path / "second", url)):
            found, stderr = machine.run(**BARE)
            assert not found["stats"]["compiles"] and not found["stats"]["runtimes"], stderr
            assert (found["loaded"], found["misses"], stderr) == (True, 0, "")
            assert found["stats"]["fetched"] >= 1
        warm, _ = machine.run(**BARE)
        assert warm["sockets"] == [] and warm["imported"] == [] and not warm["misses"]
        code, log = end(process, signal.SIGTERM)
    assert code == 0
    asked = re.findall(r"'(GET|POST) (\S+) HTTP/1.1' (\d+)", log)
    last_post = max(number for number, (verb, _, _) in enumerate(asked) if verb == "POST")
    second = [(verb, status) for verb, _, status in asked[last_post + 1 :]]
    assert second == [("GET", "200")] * 3, log  # the index, the bundle, and that of the runtime
