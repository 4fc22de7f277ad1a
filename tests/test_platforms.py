"""What works elsewhere than on Linux with glibc: one sentence says it. The other systems are imitated."""

import json
import sys

import pytest
import torch
from helpers import ran

from jitkern import cli, target
from jitkern.runtime import code_page

ANSWER = "kernels are compiled and loaded on Linux with glibc only; ops that have a reference answer with it"
DARWIN = """
def confstr(name): raise ValueError("unrecognized configuration name")
sys.platform, os.confstr = "darwin", confstr
"""
MUSL = """
def confstr(name): raise OSError(22, "Invalid argument")
os.confstr = confstr
"""
WINDOWS = """
for name in ("confstr", "fork", "geteuid", "getuid", "memfd_create", "register_at_fork", "sched_getaffinity", "uname"):
    delattr(os, name)
sys.platform, sys.modules["fcntl"] = "win32", None
"""
SYSTEMS = {"macOS": DARWIN, "Linux without glibc (as with musl)": MUSL, "Windows": WINDOWS}
CHILD = """
import contextlib, io, json, os, sys
import platformdirs, torch  # which ask for the real system as they are imported
{system}
import jitkern
from jitkern.cli import main

def refused(call):
    try:
        call()
    except jitkern.TargetError as e:
        return str(e)

def command(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        return main(words), out.getvalue()

x = torch.arange(3.0)
print(json.dumps({{
    "op": jitkern.ops.vec_add(x, x).tolist(),
    "pointwise": jitkern.pointwise(eval("lambda x: x * 2"))(x).tolist(),
    "kernel": refused(lambda: jitkern.cpp_kernel("scale.cpp", "scale")(x)),
    "inline": refused(lambda: jitkern.load_inline("one", "int one() {{ return 1; }}", functions=["one"])),
    "doctor": command("doctor"),
    "prewarm": command("prewarm", "jitkern.ops"),
}}))
"""


@pytest.mark.long
@pytest.mark.parametrize("name", SYSTEMS)
def test_elsewhere_references_answer_and_the_rest_says_why(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scale.cpp").write_text('extern "C" void scale(float* x) {}\n')
    child = CHILD.format(system=SYSTEMS[name])
    found = json.loads(ran(sys.executable, "-W", "ignore", "-c", child))
    why = f"{name} is not supported: {ANSWER}"
    assert (found["op"], found["pointwise"]) == ([0.0, 2.0, 4.0], [0.0, 2.0, 4.0])
    assert (found["kernel"], found["inline"]) == (why, why)
    code, text = found["doctor"]
    assert code == 1 and why in text and "apt-get" not in text
    code, text = found["prewarm"]
    assert code == 2 and text.splitlines()[-1].endswith(why)


@pytest.mark.parametrize(
    ("platform", "name"),
    [("darwin", "macOS"), ("win32", "Windows"), ("linux", "Linux without glibc"), ("haiku1", "haiku1")],
)  # fmt: skip
def test_nothing_is_compiled_elsewhere_than_on_linux_with_glibc(
    platform, name, monkeypatch, capsys
):
    monkeypatch.setattr(target, "glibc", lambda: "")
    monkeypatch.setattr(sys, "platform", platform)
    code_page.supported.cache_clear()
    try:
        assert not code_page.supported()
        with pytest.raises(target.TargetError, match=f"^{name}.* is not supported: {ANSWER}$"):
            target.Target.current("cpu")
        assert cli.main(["doctor"]) == 1
        printed = capsys.readouterr().out
        assert name in printed and "apt-get" not in printed
    finally:
        code_page.supported.cache_clear()


def test_a_machine_with_glibc_is_supported():
    assert not target.unsupported()
    assert target.Target.current("cpu").torch in torch.__version__
