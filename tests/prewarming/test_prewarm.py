"""Prewarming in several processes, and what a second prewarm does not build again."""

import importlib
import itertools
import os
import shutil
import signal
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from helpers import last_json, needs_runtime, one_in_four

import jitkern
from jitkern import config, jit, testing
from jitkern.cache import events
from jitkern.calls import record
from jitkern.calls.samples import ShapesAlone
from jitkern.compilers import child_process
from jitkern.errors import DeclarationError, SettingError, TargetError
from jitkern.op.op import OPS
from jitkern.prewarming import builder
from jitkern.target import Target

pytestmark = needs_runtime

MODULE = """
import torch
from jitkern.declare import Cpp, kernel
from {name}.more import SIZE
FACTOR = 2
DTYPES = (torch.float32, torch.float64, torch.int32)
op = kernel("{name}::f(Tensor x) -> Tensor", cpu=Cpp("k.cpp"))
@op.launch("cpu")
def _(k, x):
    out = torch.empty_like(x)
    k.f[{{"T": x.dtype, "N": FACTOR}}](out, x, x.numel())
    return out
@op.samples
def _(device):
    for dtype in DTYPES:
        yield torch.ones(SIZE, dtype=dtype, device=device)
    yield torch.ones(2, SIZE, device=device)
"""
KERNEL = 'extern "C" void f(T* out, const T* x, long long n) { while (n--) out[n] = N * x[n]; }\n'
numbers = itertools.count()


def report(outcome):
    code, out, err = outcome
    return code, last_json(out), err


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package of one op, with three kernels, by its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    importlib.import_module("jitkern.ops")
    name = f"prewarmed{next(numbers)}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "more.py").write_text("SIZE = 3\n")
    (folder / "kernel.py").write_text(MODULE.format(name=name))
    (folder / "k.cpp").write_text(KERNEL)
    yield name
    OPS.pop(f"{name}::f", None)


@pytest.fixture
def told(tmp_path):
    """The file where each process notes what it has built or found."""
    file = tmp_path / "told"
    file.touch()

    def note(event):
        with file.open("a") as lines:
            lines.write(f"{event.status} {event.path}\n")

    stop = events.on_compile(note)
    yield file
    stop()


def rows(found):
    results = found["results"]
    return sorted((r["op"], r["variant"], r["target"], Path(r["path"]).name) for r in results)


@pytest.mark.long
def test_many_jobs_build_what_one_builds_and_each_once(cli, package, told, cache_dir):
    code, one, _ = report(cli("prewarm", package, "--jobs", "1", "--json"))
    assert (code, one["built"]) == (0, len(one["results"])) and one["built"] >= 3 + 1
    shutil.rmtree(cache_dir)
    told.write_text("")
    code, many, err = report(cli("prewarm", package, "--jobs", "5", "--json"))
    assert (code, many["built"], rows(many)) == (0, one["built"], rows(one)), err
    built = [line for line in told.read_text().splitlines() if line.startswith("built ")]
    calls = [row for row in many["results"] if row["variant"].startswith("call")]
    assert len(set(built)) == len(built) == many["built"] - len(calls)
    assert [row["op"] for row in many["results"]] == [row["op"] for row in one["results"]]


def forbid(monkeypatch):
    """Have a prewarm fail that compiles."""

    def refuse(*_, **__):
        raise AssertionError("the second run does this again")

    monkeypatch.setattr(jit.build, "build", refuse)


@pytest.mark.long
def test_a_second_run_compiles_nothing(cli, package, monkeypatch):
    first = report(cli("prewarm", package, "vec_add", "--json"))[1]
    forbid(monkeypatch)
    code, second, err = report(cli("prewarm", package, "vec_add", "--json"))
    assert (code, second["hits"], second["built"]) == (0, first["built"], 0), err
    variants = [[row["variant"] for row in found["results"]] for found in (first, second)]
    assert variants[0] == variants[1] and rows(second) == rows(first)


@pytest.mark.long
def test_a_recording_has_a_second_run_too(cli, package, monkeypatch, tmp_path):
    module = importlib.import_module(f"{package}.kernel")
    with config.using(record=tmp_path / "calls"):
        for size in (3, 4):
            call = (torch.ones(size),)
            record.note(f"{package}::f", module.__name__, "cpu", "cc", call)
    first = report(cli("prewarm", "--from", "calls", package, "--json"))[1]
    assert first["built"] == 3  # a kernel, the runtime and a plan
    with monkeypatch.context() as patch:
        forbid(patch)
        again = report(cli("prewarm", "--from", "calls", package, "--json"))[1]
    assert (again["hits"], again["built"]) == (3, 0)
    assert report(cli("prewarm", package, "--json"))[1]["built"] > 0


def change_size(folder, module, cache_dir):
    module.SIZE = 5


def change_factor(folder, module, cache_dir):
    module.FACTOR = 3


def change_source(folder, module, cache_dir):
    (folder / "k.cpp").write_text(KERNEL + "// edited\n")


def change_launch_file(folder, module, cache_dir):
    (folder / "kernel.py").write_text((folder / "kernel.py").read_text() + "\n# edited\n")


def lose_an_entry(kind):
    def lose(folder, module, cache_dir):
        (path, *_) = cache_dir.glob(f"v1/*/{folder.name}.f.{kind}*")
        shutil.rmtree(path)

    return lose


def damage_an_entry(folder, module, cache_dir):
    (path, *_) = cache_dir.glob(f"v1/*/{folder.name}.f.f32*/*.so")
    path.write_bytes(path.read_bytes()[:-1] + b"?")


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "anew"),
    [
        (change_factor, 3 + 4),
        (change_source, 3 + 4),
        (change_launch_file, 0),  # not in this process, which has imported it
        (change_size, 0),
        (lose_an_entry("f32"), 1),
        (lose_an_entry("call"), 1),
        (damage_an_entry, 1),
    ],
)
def test_what_has_changed_is_noticed(change, anew, cli, package, cache_dir, tmp_path):
    cli("prewarm", package, "--jobs", "1")
    change(tmp_path / package, sys.modules[f"{package}.kernel"], cache_dir)
    testing.forget_samples(OPS[f"{package}::f"])
    code, found, err = report(cli("prewarm", package, "--jobs", "1", "--json"))
    assert (code, found["built"]) == (0, anew), err


@pytest.mark.long
def test_what_is_skipped_or_failed_is_tried_again(cli, compiler):
    compiler.fail = True
    for _ in range(2):
        before = len(compiler.compiles)
        code, found, _ = report(cli("prewarm", "vec_add", "--jobs", "1", "--keep-going", "--json"))
        assert (code, found["failed"], len(compiler.compiles) - before) == (1, 4, 4)


@pytest.mark.long
def test_refresh_and_an_exact_compiler_build_anew(cli, package, told):
    cli("prewarm", package)
    for settings, options in (({"compiler": "exact"}, ()), ({}, ("--refresh",))):
        told.write_text("")
        with config.using(**settings):
            assert cli("prewarm", package, "--jobs", "1", *options)[0] == 0
        assert len(told.read_text().splitlines()) >= 3


@pytest.mark.long
def test_what_is_refreshed_and_not_built_is_exit_1(cli, package, monkeypatch):
    """A launch record that is cached is no kernel."""
    assert cli("prewarm", package)[0] == 0
    monkeypatch.setenv("PATH", "/nonexistent")
    testing.set_settings(monkeypatch)
    assert cli("prewarm", package, "--jobs", "1")[0] == 0
    code, _, err = cli("prewarm", package, "--jobs", "1", "--refresh")
    assert code == 1
    assert f"neither built nor cached: {package}::f f32.N2" in err


@pytest.mark.long
def test_a_dead_worker_is_a_failed_row_and_the_rest_is_built(cli, compiler, package):
    parent = os.getpid()

    def die():
        if compiler.compiles[-1].label == "f64.N2":
            assert os.getpid() != parent
            os.kill(os.getpid(), signal.SIGKILL)

    compiler.during = die
    arguments = ("prewarm", package, "--jobs", "2", "--keep-going", "--json")
    code, found, _ = report(cli(*arguments))
    (failed,) = [row for row in found["results"] if row["status"] == "failed"]
    assert (code, failed["op"], failed["variant"]) == (1, f"{package}::f", "f64.N2")
    says = "the process that built it was ended by SIGKILL; if memory was short, use fewer --jobs"
    assert failed["reason"] == says
    kernels = {r["variant"] for r in found["results"] if r["status"] == "built"}
    assert {"f32.N2", "i32.N2"} <= kernels
    compiler.during = lambda: None
    assert report(cli(*arguments))[1]["failed"] == 0


@pytest.mark.long
def test_a_dead_compiler_is_a_failed_row_and_the_rest_is_built(cli, package, tmp_path, monkeypatch):
    for name in ("cc", "c++"):
        script = tmp_path / "bin" / name
        script.parent.mkdir(exist_ok=True)
        real = shutil.which(name)
        dies = 'case "$*" in *double*) kill -9 $$ ;; esac'
        script.write_text(f'#!/bin/sh\n{dies}\nexec {real} "$@"\n')
        script.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        testing.set_settings(patch)
        arguments = ("prewarm", package, "--jobs", "2", "--keep-going", "--json")
        code, found, err = report(cli(*arguments))
    (failed,) = [row for row in found["results"] if row["status"] == "failed"]
    assert (code, failed["op"], failed["variant"]) == (1, f"{package}::f", "f64.N2"), err
    kernels = {r["variant"] for r in found["results"] if r["status"] == "built"}
    assert {"f32.N2", "i32.N2"} <= kernels
    assert report(cli(*arguments))[1]["failed"] == 0


@pytest.mark.long
@pytest.mark.parametrize("jobs", ["1", "3"])
def test_a_notebook_can_compile_after_an_interrupted_prewarm(cli, package, monkeypatch, jobs):
    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(builder.Builder, "take", interrupt)
        assert cli("prewarm", package, "--jobs", jobs)[0] == 130
    assert child_process.run(["echo", "lives"]) == (0, "lives\n")


@pytest.mark.long
def test_an_error_of_a_worker_is_raised_here(cli, compiler, package, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = cli("prewarm", package, "--jobs", "3", "--cache-dir", str(tmp_path / "file"))
    assert (code, "is a file; remove it" in err) == (3, True), err


META = {"device": "meta"}
MADE = [
    lambda: torch.randn(3, 4, **META),
    lambda: torch.rand((2, 0), dtype=torch.float16, requires_grad=True, **META),
    lambda: torch.randn(size=(2, 3), **META),
    lambda: torch.randn([], dtype=torch.complex64, **META),
    lambda: torch.randn_like(torch.empty(3, 4, **META).T),
    lambda: torch.rand_like(torch.empty(3, 4, **META), dtype=torch.float64),
    lambda: torch.empty_like(torch.empty(3, 4, **META)),
    lambda: torch.empty_like(torch.empty(3, 4, **META).T),
    lambda: torch.empty_like(torch.empty(2, 3, 4, 5, **META), memory_format=torch.channels_last),
    lambda: torch.empty_like(torch.empty(3, **META), device="cpu"),
    lambda: torch.softmax(torch.empty(3, 4, **META), dim=-1),
    lambda: torch.softmax(torch.empty(3, 4, **META).T, 1),
    lambda: torch.softmax(torch.empty(3, 4, **META), 0, dtype=torch.float64),
    lambda: torch.empty(3, 4, **META).softmax(1),
    lambda: torch.empty(3, 4, **META, requires_grad=True).softmax(1),
    lambda: torch.softmax(torch.empty(3, 4, **META), dim=2),
    lambda: torch.softmax(torch.empty(3, 4, dtype=torch.int32, **META), dim=1),
    lambda: torch.empty(3, 4, **META) / 2,
    lambda: 0.5 * torch.empty(3, 4, dtype=torch.bfloat16, **META),
    lambda: torch.empty(4, 3, **META).T / 2,
    lambda: torch.empty(3, 4, dtype=torch.int32, **META) / 2,
    lambda: torch.empty(3, 4, **META) * 2j,
    lambda: torch.empty(3, 4, **META) / torch.empty(4, dtype=torch.float64, **META),
    lambda: torch.empty(3, 4, **META, requires_grad=True) / 2,
    lambda: torch.randn(3),
    lambda: torch.arange(4, **META),
    lambda: torch.randint(9, (3, 4), **META),
    lambda: torch.randint(-128, 127, [2, 3], dtype=torch.int8, **META),
    lambda: torch.randint(0, 2, (5,), dtype=torch.float32, **META),
    lambda: torch.randint(2, 2, (5,), **META),
    lambda: torch.randint(0, high=5, size=(2,), **META),
    lambda: torch.randint(0, (3,), **META),
]


@pytest.mark.parametrize("number", one_in_four(range(len(MADE))))
def test_shapes_alone_are_those_of_torch(number):
    make = MADE[number]

    def described():
        try:
            made = make()
        except (RuntimeError, IndexError) as e:
            return type(e)
        place = made.device, made.storage_offset()
        return made.shape, made.stride(), made.dtype, *place, made.requires_grad

    wanted = described()
    with ShapesAlone():
        assert described() == wanted


@pytest.mark.long
def test_what_the_shipped_ops_need_is_found_without_sympy(run_python):
    done = run_python(
        "import sys, jitkern.ops; from jitkern.op.all_ops import all_ops; from jitkern.op.needed_kernels import needs_of\n"
        "for op in all_ops().values():\n"
        "    for device, sources in op.sources.items():\n"
        "        for source in sources: assert needs_of(op, source, device).variants\n"
        "print('sympy' in sys.modules)"
    )
    assert done.stdout == "False\n", done.stderr


@pytest.mark.long
def test_the_python_api_does_what_the_command_does(package, cache_dir):
    importlib.import_module(f"{package}.kernel")
    op, steps = OPS[f"{package}::f"], []
    before = {name: dict(vars(other)) for name, other in OPS.items() if name != op.name}
    found = jitkern.prewarm([op], progress=steps.append)
    assert {result.status for result in found} == {"built"}
    assert len([result for result in found if "call" not in result.variant]) >= 3 + 1
    *_, last = [step for step in steps if step.finished]
    assert (last.done, last.total) == (last.total, len([step for step in steps if step.finished]))
    assert {name: dict(vars(other)) for name, other in OPS.items() if name != op.name} == before
    again = jitkern.prewarm([package], [Target.current("cpu")])
    assert {result.status for result in again} == {"hit"} and len(again) == len(found)
    with pytest.raises(DeclarationError, match="`nothing` is not a declared op"):
        jitkern.prewarm(["nothing"])
    with pytest.raises(TargetError):
        jitkern.prewarm([op], ["cuda-sm_nothing"])


def test_a_single_name_is_not_iterated():
    with pytest.raises(DeclarationError, match="`nothing` is not a declared op"):
        jitkern.prewarm("nothing")


@pytest.mark.long
def test_the_python_api_shards_what_it_is_given(package, cache_dir):
    importlib.import_module(f"{package}.kernel")
    op = OPS[f"{package}::f"]
    parts = [jitkern.prewarm([op], shard=(part, 2)) for part in (1, 2)]
    one, two = (
        {r.path for r in part if r.op == op.name and "call" not in r.variant} for part in parts
    )
    assert one and two and not one & two
    whole = jitkern.prewarm([op])
    assert {result.status for result in whole} == {"hit"}


@pytest.mark.parametrize("shard", [(0, 3), (4, 3), (1, 0), (0, 0), (-1, 2)])
def test_a_part_that_there_is_not_is_refused(shard):
    with pytest.raises(SettingError, match="with a part from 1 to parts"):
        jitkern.prewarm(["vec_add"], shard=shard)


@pytest.mark.parametrize(
    "text",
    ["0/3", "4/3", "1/0", "0/0", "-1/2", "auto", "1", "/", "1/", "/2", "1/2/3", "a/b", "\u00b2/3", "1.0/2"],
)  # fmt: skip
def test_what_is_no_part_of_a_number_is_refused(text, cli):
    code, out, err = cli("prewarm", "vec_add", f"--shard={text}")
    assert (code, out, f"`{text}` is not I/N with I from 1 to N" in err) == (2, "", True)


@pytest.mark.long
def test_a_package_in_a_zip_file_is_prewarmed_and_called(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(tmp_path / "all.zip"), *sys.path])
    module = (
        "import torch\nfrom jitkern.declare import Cpp, kernel\n"
        "op = kernel('zipped::{name}(Tensor x) -> Tensor', cpu=Cpp({source}))\n"
        "@op.launch('cpu')\ndef _(k, x):\n    out = torch.empty_like(x)\n"
        "    k.f(out, x, x.numel())\n    return out\n"
        "@op.samples\ndef _(device): yield torch.ones(3, device=device)\n"
    )
    text = 'extern "C" void f(float* out, const float* x, long n) { out[0] = 2 * x[0]; }'
    with zipfile.ZipFile(tmp_path / "all.zip", "w") as file:
        for name in ("zipped", "zipped/ops", "zipped/ops/deep"):
            file.writestr(f"{name}/__init__.py", "")
        file.writestr("zipped/ops/deep/kernel.py", module.format(name="a", source=f"text={text!r}"))
        file.writestr("zipped/ops/kernel.py", module.format(name="b", source="'b.cpp'"))
        file.writestr("zipped/ops/b.cpp", text)
        file.writestr("zipped_not/kernel.py", "raise ImportError")
    try:
        code, found, err = report(cli("prewarm", "zipped", "--json", "--keep-going"))
        assert code == 1
        status = {(r["op"], r["status"]) for r in found["results"]}
        assert {("zipped::a", "built"), ("zipped::b", "failed")} <= status
        assert ("zipped::a", "failed") not in status and ("zipped::b", "built") not in status
        assert "b.cpp lies in the file" in err
        assert "all.zip, and sources are read from folders" in err
        with config.using(compile="never"):
            assert OPS["zipped::a"](torch.ones(1)).tolist() == [2]
    finally:
        OPS.pop("zipped::a", None)
        OPS.pop("zipped::b", None)
