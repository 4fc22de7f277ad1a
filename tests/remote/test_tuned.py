"""What comes before a kernel is missed: a choice among configurations, or the background's turn."""

import threading

import pytest
import torch
from helpers import LONGEST, declared, until
from tuning import MODULE, RUN, SOURCE
from web_servers import Server, fill, settings_file, static

from jitkern import config
from jitkern.cache.store import Cache
from jitkern.runtime import specializer


@pytest.mark.long
def test_a_remotes_choice_comes_before_measuring(tmp_path, run_python):
    (tmp_path / "k.cpp").write_text(SOURCE)
    (tmp_path / "tuned.py").write_text(MODULE.format(ways="(5, 3)", key="None"))
    code = RUN.format(warm=False) + "print(jitkern.stats()['compiles'])\n"

    def run(cache, **environment):
        done = run_python(code, JITKERN_CACHE_DIR=str(tmp_path / cache), **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("builder") == "[6.0, 6.0, 6.0] [5, 3]\n2\n"
    fill(Cache(tmp_path / "builder"), tmp_path / "remote")
    url = f"file://{tmp_path / 'remote'}"
    trust = {
        "JITKERN_REMOTE": url,
        "XDG_CONFIG_HOME": str(settings_file(tmp_path, trusted_remotes=[url])),
    }
    for environment in ({}, {"JITKERN_COMPILE": "never"}):
        found = run(f"node{len(environment)}", **trust, **environment)
        assert found == "[6.0, 6.0, 6.0] []\n0\n"


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
    op.forget("cpu")
    fill(Cache(tmp_path / "builder"), tmp_path / "remote")
    answer = static(tmp_path / "remote")
    cache = Cache(tmp_path / "cache")
    with (
        Server(once_returned) as server,
        config.using(
            remote=server.url, trusted_remotes=server.url, compile="background", cc="/nonexistent"
        ),
    ):
        assert torch.equal(op(x), 2 * x)
        returned.set()
        until(lambda: list(cache.paths()))
        assert not waited
