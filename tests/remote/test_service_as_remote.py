"""`jitkern serve` as the remote of machines without any compiler."""

import re
import signal

import pytest
from machines import Machine
from served import end, serving

from jitkern.runtime import binding

pytestmark = pytest.mark.skipif(not binding.runtime(), reason="no launch runtime on this platform")
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
