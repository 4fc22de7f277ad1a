"""What comes before a kernel is missed: a choice among configurations, or the background's turn."""

import json
import threading

import pytest
import torch
from helpers import LONGEST, declared, until
from web_servers import Server, fill, settings_file, static

from jitkern import config
from jitkern.cache.store import Cache
from jitkern.runtime import specializer

SOURCE = """
extern "C" void scale(T* y, const T* x, double a, long n) {
  for (long i = 0; i < n; i++) y[i] = a * x[i] * WAY / WAY;
}
"""
MODULE = """
import json, torch
from jitkern.declare import Cpp, kernel
op = kernel("jitkern_fetched::scaled(Tensor x) -> Tensor", cpu=Cpp("k.cpp"))
@op.reference
def _(x): return 2 * x
@op.tune("cpu", key=lambda x: x.shape[0])
def _(x): return [{"WAY": 5}, {"WAY": 3}]
@op.launch("cpu")
def _(k, x):
    out = torch.empty_like(x)
    k.scale[{"T": x.dtype, "WAY": k.config["WAY"]}](out, x, 2.0, x.numel())
    return out
"""
RUN = """
import json, torch
from jitkern.launch import measure
measured = []
def milliseconds(run, candidate, device, *, cold):
    run(candidate)()
    measured.append(candidate["WAY"])
    return float(candidate["WAY"])
measure.milliseconds = milliseconds
import jitkern, tuned
from jitkern.runtime import specializer
x = torch.ones(3)
assert torch.equal(tuned.op(x), 2 * x)
specializer.settle()
print(json.dumps([measured, jitkern.stats()["compiles"]]))
"""


@pytest.mark.long
def test_a_remotes_choice_comes_before_measuring(tmp_path, run_python):
    (tmp_path / "k.cpp").write_text(SOURCE)
    (tmp_path / "tuned.py").write_text(MODULE)

    def run(cache, **environment):
        done = run_python(
            RUN, PYTHONPATH=str(tmp_path), JITKERN_CACHE_DIR=str(tmp_path / cache), **environment
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert run("builder") == [[5, 3], 2]
    fill(Cache(tmp_path / "builder"), tmp_path / "remote")
    url = f"file://{tmp_path / 'remote'}"
    trust = {
        "JITKERN_REMOTE": url,
        "XDG_CONFIG_HOME": str(settings_file(tmp_path, trusted_remotes=[url])),
    }
    for environment in ({}, {"JITKERN_COMPILE": "never"}):
        assert run(f"node{len(environment)}", **trust, **environment) == [[], 0]


@pytest.mark.long
def test_in_the_background_mode_no_call_waits_for_a_remote(tmp_path):
    def launch(k, x):
        out = torch.empty_like(x)
        k.scale[{"T": x.dtype, "WAY": 1}](out, x, 2.0, x.numel())
        return out

    returned, waited = threading.Event(), []

    def once_returned(connection, request):
        if not returned.wait(LONGEST):
            waited.append(request.path)
        return answer(connection, request)

    def reference(x):
        return 2 * x

    op = declared(
        "jitkern_fetched::later(Tensor x) -> Tensor", tmp_path / "k.cpp", SOURCE, launch, reference
    )
    x = torch.ones(4)
    with config.using(cache_dir=tmp_path / "builder"):
        op(x)
        specializer.settle()
    op.backends["cpu"].forget()
    fill(Cache(tmp_path / "builder"), tmp_path / "remote")
    answer = static(tmp_path / "remote")
    cache = Cache(tmp_path / "cache")
    with (
        Server(once_returned) as server,
        config.using(
            remote=server.url,
            trusted_remotes=server.url,
            compile="background",
            cc="/nonexistent",
        ),
    ):
        assert torch.equal(op(x), 2 * x)
        returned.set()
        until(lambda: list(cache.paths()))
        assert not waited
