"""The command line, as a user types it."""

import importlib
import io
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import H100, kernels, last_json, needs_nvrtc

from jitkern import config, declare, jit
from jitkern.cli import main, output
from jitkern.errors import CompilerNotFound, NotCached
from jitkern.op import recorder
from jitkern.op.all_ops import all_ops
from jitkern.op.op import OPS
from jitkern.prewarming.builder import Step
from jitkern.source.kinds import Variant
from jitkern.target import Target


def test_prewarm_then_hits_then_explain_then_clear(cli, cache_dir):
    code, out, err = cli("prewarm", "vec_add", "softmax_backward", "--json", "-v")
    first = last_json(out)
    assert (code, first["schema"]) == (0, 1)
    assert (first["hits"], first["failed"], first["skipped"]) == (0, 0, 0)
    assert first["built"] == len(first["results"]) >= 7
    assert "[1/" in err
    result = first["results"][0]
    assert set(result) == {"op", "variant", "target", "status", "seconds", "path", "reason"}
    assert result["op"].startswith("jitkern::") and Path(result["path"]).is_dir()

    code, out, _ = cli("prewarm", "vec_add", "jitkern::softmax_backward")
    assert (code, "0 built" in out) == (0, True)

    code, out, _ = cli("explain", "vec_add", "-v")
    assert code == 0 and out.count(str(cache_dir)) >= 8 and "not cached" not in out

    code, out, _ = cli("cache", "ls", "--json")
    listed = last_json(out)
    assert listed["totals"]["entries"] == first["built"]
    assert {e["op"] for e in listed["entries"]} == {
        "jitkern::vec_add", "jitkern::softmax_backward", "jitkern::runtime"
    }  # fmt: skip
    variants = {e["variant"] for e in listed["entries"] if e["op"] == "jitkern::vec_add"}
    assert variants > {"f32", "f16", "bf16", "f64"}

    code, out, _ = cli("cache", "show", "vec_add.f32", "--json")
    assert last_json(out)["entries"][0]["manifest"]["inputs"]["op"] == "jitkern::vec_add"

    assert cli("cache", "clear", "--op", "vec_add")[0] == 2
    assert cli("cache", "clear", "--op", "vec_add", "--dry-run")[1].count("vec_add") > 8
    assert cli("cache", "clear", "--op", "vec_add", "--yes")[0] == 0
    assert last_json(cli("cache", "ls", "--json")[1])["totals"]["entries"] < first["built"] - 8
    assert cli("cache", "clear", "--yes")[0] == 0
    assert last_json(cli("cache", "ls", "--json")[1])["totals"]["entries"] == 0


def shipped():
    return {name for name in all_ops() if name.startswith("jitkern::")}


FEW = ("vec_add", "muladd", "softmax_backward")


@pytest.mark.long
@needs_nvrtc
@pytest.mark.parametrize("ops", [FEW, ("jitkern",)])
def test_prewarm_for_another_machines_gpu(cli, ops):
    wanted = shipped() if ops == ("jitkern",) else {f"jitkern::{name}" for name in ops}
    code, out, err = cli("prewarm", *ops, "--target", H100, "--json")
    report = last_json(out)
    assert (code, report["failed"], report["hits"]) == (0, 0, 0), report
    assert {r["op"] for r in kernels(report) if r["status"] == "built"} == wanted
    skipped = [r for r in report["results"] if r["status"] == "skipped"]
    assert all(
        r["variant"] == "extension"
        and ("built with the Torch they run on" in r["reason"] or "without CUDA" in r["reason"])
        for r in skipped
    )
    targets = {r["target"] for r in kernels(report) if r["status"] == "built"}
    arch_specific = H100.replace("sm_90", "sm_90a")  # where a source says arch_specific=True
    assert targets - {arch_specific} == {H100}
    again = last_json(cli("prewarm", *ops, "--target", H100, "--json")[1])
    assert (again["built"], again["hits"]) == (0, report["built"])
    assert cli("prewarm", "muladd", "--target", H100, "--fail-on-miss")[0] == (1 if skipped else 0)
    out = cli("explain", "vec_add", "--target", H100.replace("90", "80"))[1]
    assert "nearest entry: arch is sm_90 instead of sm_80" in out


@pytest.mark.long
def test_shards_split_the_work_and_together_leave_nothing_to_do(cli, cache_dir):
    ops = ("vec_add", "muladd", "softmax", "softmax_backward")  # a call of which needs one kernel
    parts = []
    cpu = str(Target.current("cpu"))
    for shard in ("1/3", "2/3", "3/3"):
        code, out, err = cli("prewarm", *ops, "--shard", shard, "--target", cpu, "--json")
        assert code == 0, err
        report = last_json(out)
        assert report["failed"] == 0
        parts.append({(r["op"], r["variant"]) for r in kernels(report)})
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    for one, other in itertools.combinations(parts, 2):
        assert not one & other
    with config.using(compile="never"):
        whole = last_json(cli("prewarm", *ops, "--target", cpu, "--json")[1])
    assert (whole["built"], whole["failed"], whole["skipped"]) == (0, 0, 0)
    assert {(r["op"], r["variant"]) for r in kernels(whole)} == set().union(*parts)


@pytest.mark.long
def test_a_failed_build_exits_1_and_keep_going_goes_on(cli, compiler):
    compiler.fail = True
    code, out, err = cli("prewarm", "vec_add", "--json", "--jobs", "1")
    report = last_json(out)
    assert (code, report["failed"]) == (1, 1)
    assert report["skipped"] == 3
    report = last_json(cli("prewarm", "vec_add", "--json", "--keep-going")[1])
    assert (report["failed"], report["skipped"]) == (4, 0)
    assert "the fake refuses" in report["results"][0]["reason"]


OP = """
import torch
from jitkern.declare import Cpp, kernel
{name} = kernel("{package}::{name}(Tensor x) -> Tensor", cpu=Cpp("k.cpp"))
@{name}.launch("cpu")
def _(k, x):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    k.f[{{"T": x.dtype}}](out, x)
    return out
@{name}.samples
def _(device):
    {samples}
"""


@pytest.fixture
def package(tmp_path, monkeypatch, compiler):
    """Write a package here, of these files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(name, **files):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "k.cpp").write_text('extern "C" void f(T* out, const T* x) {}\n')
        for file, text in {"__init__": "", **files}.items():
            (folder / f"{file}.py").write_text(text)

    importlib.import_module("jitkern.ops")
    before = set(all_ops())
    yield write
    for name in OPS.keys() - before:
        del OPS[name]


def op_text(package, name, *samples):
    return OP.format(package=package, name=name, samples="; ".join(samples))


GOOD = "yield torch.ones(3, device=device)"


@pytest.mark.long
def test_an_op_without_samples_is_a_miss(cli, package):
    package("unsampled", kernel=op_text("unsampled", "none", "return ()")
            + op_text("unsampled", "elsewhere", f'if device == "cpu": {GOOD}')
            + op_text("unsampled", "good", GOOD))  # fmt: skip
    code, out, _ = cli("prewarm", "unsampled", "--json")
    report = last_json(out)
    assert (code, len(kernels(report)), report["skipped"]) == (0, 3, 2)
    for row in report["results"][-2:]:
        assert row["op"] in ("unsampled::none", "unsampled::elsewhere")
        assert row["status"] == "unsampled"
        assert f"{row['op']}: no sample calls: add `@op.samples`" in row["reason"]
    assert cli("prewarm", "unsampled", "--fail-on-miss")[0] == 1
    code, _, err = cli("prewarm", "unsampled", "--target", "cpu")
    wanted = "neither built nor cached: unsampled::elsewhere cpu, unsampled::none cpu"
    assert (code, wanted in err) == (1, True), err
    assert cli("prewarm", "unsampled::good", "--fail-on-miss")[0] == 0
    code, _, err = cli("prewarm", "unsampled::none")
    assert (code, "nothing was built for unsampled::none: everything was skip" in err) == (1, True)
    assert cli("prewarm", "unsampled::none", "--shard", "1/2")[0] == 0


def test_an_op_without_a_kernel_for_the_targets_is_told(cli, package, tmp_path):
    text = op_text("elsewhere", "f", GOOD).replace("cpp", "cu").replace("cpu", "cuda")
    package("elsewhere", kernel=text.replace("Cpp", "Cuda"))
    (tmp_path / "elsewhere" / "k.cu").touch()
    code, out, err = cli("prewarm", "elsewhere", "--target", str(Target.current("cpu")))
    assert (code, "0 built" in out) == (1, True)
    assert "elsewhere::f: their kernels are for cuda: add e.g. --target cuda-sm_90-cu130-" in err


@pytest.mark.long
def test_a_package_that_raises_is_left_out_and_the_rest_is_built(cli, package):
    package("raising", __init__="raise RuntimeError('boom')")
    package("exiting", __init__="raise SystemExit(0)")
    package("lacking", __init__="import no_such_dependency")
    package("half", __init__=op_text("half", "made", GOOD), kernel="1 / 0")
    names = ("raising", "exiting", "lacking", "lacking.sub", "half")
    code, out, err = cli("prewarm", *names, "--json")
    report = last_json(out)
    assert (code, report["built"] > 0, report["failed"]) == (1, True, 5), err
    assert "half::made" in {row["op"] for row in kernels(report) if row["status"] == "built"}
    reasons = {row["op"]: row["reason"] for row in report["results"] if row["status"] == "failed"}
    assert set(reasons) == set(names)
    reason = reasons["raising"]
    assert reason.startswith("raising cannot be imported: ")
    assert "raising/__init__.py:1: RuntimeError: boom" in reason
    assert "SystemExit: 0" in reasons["exiting"] and "no_such_dependency" in reasons["lacking"]
    for command in ("list", "explain"):
        code, out, err = cli(command, "raising", "--json")
        report = last_json(out)
        assert (code, report["ops"], report["broken"]) == (1, [], {"raising": reasons["raising"]})
        assert err == f"jitkern: {reason}\n"


def test_an_installed_module_that_ends_the_program_is_left_out(cli, package, monkeypatch):
    package("ending", __init__="raise SystemExit(3)")
    monkeypatch.syspath_prepend(".")
    monkeypatch.setattr(declare, "installed", lambda: ["ending"])
    code, out, err = cli("list", "jitkern")
    assert (code, "jitkern::softmax" in out) == (0, True)
    assert "the installed ending cannot be imported: " in err
    code, out, err = cli("prewarm", "ending", "--json")
    (row,) = last_json(out)["results"]
    assert (code, row["status"], err.count("SystemExit: 3")) == (1, "failed", 1)


def test_a_module_of_a_package_can_be_named(cli, package):
    package("modular", ops=op_text("modular_ops", "f", GOOD), more="")
    assert "modular_ops::f" in cli("list", "modular.ops")[1]
    for name in ("modular.more", "modular.none", "modular..ops", "none.ops"):
        code, _, err = cli("list", name)
        assert (code, f"`{name}` is not an op" in err) == (2, True), err


def test_a_path_and_a_misspelt_module_are_told_the_name(cli, package, tmp_path, monkeypatch):
    package("pathed", ops=op_text("pathed_ops", "f", GOOD))
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "kernel.py").touch()
    for name in ("./alone", "alone/kernel.py", "../alone/kernel.py", "pathed/ops.py"):
        inside = name.startswith("..")
        monkeypatch.chdir(tmp_path / "pathed" if inside else tmp_path)
        says = "pathed.ops" if name == "pathed/ops.py" else "alone.kernel"
        code, _, err = cli("list", name)
        where = f", in the folder {tmp_path};" if inside else ";"
        assert (code, f"a path is not a name: write `{says}`{where}" in err) == (2, True), err
    assert "did you mean pathed.ops?" in cli("list", "pathed.opss")[2]
    assert "did you mean pathed?" in cli("prewarm", "pahted")[2]


@pytest.mark.parametrize("name", ["half_told", "half_imported"])
def test_check_names_ops_that_their_package_does_not_import(cli, package, name):
    package(name, __init__=f"import {name}.kernel", kernel=op_text(name, "f", GOOD))
    (Path.cwd() / name / "more").mkdir()
    (Path.cwd() / name / "more" / "kernel.py").write_text(op_text(name, "g", GOOD))
    if name == "half_imported":  # as an installed package is
        sys.path.insert(0, str(Path.cwd()))
        importlib.import_module(name)
    report = last_json(cli("check", name, "--json")[1])
    assert {check["op"] for check in report["checks"]} == {f"{name}::f", f"{name}::g"}
    assert report["unimported"] == {f"{name}::g": f"{name}.more.kernel"}


def test_a_package_is_searched_to_its_depth(cli, package, tmp_path):
    package("deep", below="")
    for folder in ("deep/one/two", "deep/no-module"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "kernel.py").write_text(op_text("deep_ops", "f", GOOD))
    assert "deep_ops::f" in cli("list", "deep")[1]
    package("hidden", elsewhere=op_text("hidden_ops", "f", GOOD))
    code, _, err = cli("list", "hidden")
    assert (code, "name the module that declares its ops" in err) == (2, True), err
    assert "hidden_ops::f" in cli("list", "hidden.elsewhere")[1]


@pytest.mark.long
def test_a_bad_sample_takes_no_good_one_away(cli, package, compiler, tmp_path):
    samples = "yield 3", GOOD, "yield 4", "raise ValueError('trouble')"
    package("mixed", kernel=op_text("mixed", "f", *samples))
    code, out, _ = cli("prewarm", "mixed", "--json")
    assert (code, [r["status"] for r in last_json(out)["results"]]) == (1, ["failed"])
    code, out, _ = cli("prewarm", "mixed", "--jobs", "1", "--json", "--keep-going")
    rows = last_json(out)["results"]
    failed = (
        f"mixed::f: {tmp_path / 'mixed' / 'kernel.py'}:7: its launch function failed on sample {{}}: "
        "AttributeError: 'int' object has no attribute 'shape'"
    )
    broken = f"mixed::f: {tmp_path / 'mixed' / 'kernel.py'}:12: its samples failed after 3: ValueError: trouble"
    assert [row["reason"] for row in rows if row["status"] == "failed"] == [
        failed.format(1), failed.format(3), broken
    ]  # fmt: skip
    assert (code, [v.label for v in compiler.compiles]) == (1, ["f32"])
    explained = last_json(cli("explain", "mixed::f", "--json")[1])["ops"][0]["variants"]
    assert [row["reason"] for row in explained if row["reason"].startswith("mixed::f: ")] == [
        failed.format(1), failed.format(3), broken
    ]  # fmt: skip


def test_of_the_current_directory_only_what_is_named_is_imported(cli, package, tmp_path):
    (tmp_path / "stray.py").write_text("")
    package("named", __init__=op_text("named", "f", GOOD))
    package("straying", __init__="import stray")
    before = [*sys.path]
    assert "named::f" in cli("list", "named")[1]
    assert "No module named 'stray'" in cli("list", "straying")[2]
    assert sys.path == before


def test_formulas_of_a_named_package_are_found_beside_kernels(cli, package):
    package(
        "formulated",
        __init__="from formulated.formula import doubled",
        kernel=op_text("formulated", "f", GOOD),
        formula="import jitkern\n\n@jitkern.pointwise\ndef doubled(x):\n    return x * 2\n",
    )
    code, out, err = cli("list", "formulated")
    assert (code, "formulated::f(" in out, "formulated::doubled_" in out) == (0, True, True), err


@pytest.mark.long
@pytest.mark.parametrize("command", [["explain", "softmax"], ["prewarm", "vec_add"]])
def test_the_command_imports_nothing_from_the_current_directory(tmp_path, command):
    (tmp_path / "numpy.py").write_text(
        "import pathlib; pathlib.Path('ran').touch(); raise ImportError"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "jitkern", *command, "--target", H100],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "ran").exists()


def test_explain_of_an_op_without_samples_says_what_is_cached(cli, tmp_path, monkeypatch):
    text = """
from jitkern.declare import Cpp, kernel
op = kernel("sampleless::op(Tensor x) -> Tensor", cpu=Cpp(text='extern "C" void f(float* x) {}'))
op.launch("cpu")(lambda k, x: k.f(x) or x.clone())
"""
    (tmp_path / "sampleless.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    code, out, err = cli("explain", "sampleless")
    assert code == 0, err
    assert f"declared in {tmp_path}/sampleless.py:3\n" in out
    assert "its variants are not known: add `@op.samples`" in out
    assert "no kernel for" not in out


@pytest.mark.parametrize("name", ["facade", "decade"])
def test_an_op_whose_name_is_hexadecimal_is_explained(cli, package, name):
    package(name, kernel=op_text(name, name, GOOD))
    code, out, err = cli("explain", name)
    assert (code, f"{name}::{name}(Tensor x)" in out) == (0, True), err
    code, _, err = cli("explain", "beefed")
    assert (code, "matches `beefed`" in err) == (2, True), err


@pytest.mark.parametrize("columns", [20, 80, 200])
def test_the_bar_never_wraps(monkeypatch, columns):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

        def fileno(self):
            return 2

    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((columns, 24)))
    progress = output.Progress()
    progress(Step(1, 2, "built   " + "x" * 300, finished=True))
    (shown,) = filter(None, sys.stderr.getvalue().split("\r\033[K"))
    assert len(shown) == columns - 1


@pytest.mark.long
def test_no_compiler_is_skipped_with_the_remedy(cli):
    with config.using(cxx="no-such-compiler"):
        code, out, _ = cli("prewarm", "vec_add", "--json")
    report = last_json(out)
    assert (code, report["skipped"]) == (1, 4)
    assert "apt-get install g++" in report["results"][0]["reason"]


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.long
def test_gradients_are_built_for_beside_a_kernel_alone(cli, compiler, monkeypatch, there):
    begun, ensure = [], jit.ensure_and_tell

    def begin(variant, target, **options):
        begun.append(variant.op)
        if variant.op == recorder.NAME or (variant.op == "jitkern::softmax" and not there):
            raise CompilerNotFound("none is here")
        return ensure(variant, target, **options)

    monkeypatch.setattr(jit, "ensure_and_tell", begin)
    cli("prewarm", "softmax", "--jobs", "1", "--target", str(Target.current("cpu")))
    assert (recorder.NAME in begun, begun.count("jitkern::softmax") > 1) == (there, True)


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "PyTorch kernels that compile on first use"),
        (("bogus",), 2, "invalid choice"),
        (("prewrm",), 2, "invalid choice: 'prewrm'; did you mean prewarm? See jitkern --help"),
        (("--prewarm",), 2, "unrecognized arguments: --prewarm; the options of a command follow"),
        (("prewarm", "--target", "cuda-sm_90"), 2, "`cuda-sm_90` is not a target: expected something like"),
        (("prewarm", "--target", "sm90"), 2, "did you mean sm_90?"),
        (("prewarm", "--target", "cuda-sm_90-cu130-torch2.13"), 2, "did you mean cuda-sm_90-cu130-torch2.13.0?"),
        (("prewarm", "--jobs", "0"), 2, "not a number from 1 up"),
        (("prewarm", "--shard", "3/2"), 2, "not I/N"),
        (("prewarm", "nosuch"), 2, "`nosuch` is not an op, a namespace or a package with kernels; `jitkern list` prints all"),
        (("prewarm", "nosuch::op"), 2, "that is not installed, name the package"),
        (("explain", "nosuch"), 2, "is not an op"),
        (("cache", "show", "nosuch"), 2, "matches `nosuch`"),
        (("cache", "explain", "nosuch"), 2, "matches `nosuch`"),
        (("cache", "ls", "--kind", "tritn"), 2, "did you mean triton?"),
        (("cache", "ls", "--cache-dir", "/nonexistent"), 3, "there is no cache at /nonexistent"),
        (("explain", "vec_add", "--cache-dir", "/nonexistent"), 3, "no cache at /nonexistent"),
        (("prewarm", "vec_add", "--call", "f16[8, f16[8]"), 2, "sizes are whole numbers between `[` and `]`"),
        (("prewarm", "vec_add", "--call", "f61[8], f16[8]"), 2, "; dtypes are f16, "),
        (("prewarm", "vec_add", "--call", "f16[8], 5"), 2, "`5` does not describe a tensor"),
        (("prewarm", "vec_add", "--call", "f16[8]"), 2, "got no y for jitkern::vec_add("),
        (("prewarm", "vec_add", "--call", "softmax(f16[8])"), 2, "0 of the chosen ops fit, which are vec_add; write"),
        (("prewarm", "--call", "sofmax(f16[8])"), 2, "ops fit; did you mean softmax? Write"),
        (("init", "not-a-name"), 2, "not a usable module name"),
        (("init", "json"), 2, "not a usable module name"),
    ],
)  # fmt: skip
def test_bad_input_has_a_message_and_a_code(cli, arguments, code, says):
    found, out, err = cli(*arguments)
    assert (found, says in err, out) == (code, True, ""), err


def test_an_error_of_ours_has_its_traceback(monkeypatch):
    def broken(_):
        raise ValueError("an assumption was wrong")

    monkeypatch.setattr("jitkern.cli.doctor.run", broken)
    with pytest.raises(ValueError, match="an assumption was wrong"):
        main(["doctor"])


def test_a_cache_that_is_a_file_exits_3(cli, tmp_path):
    (tmp_path / "file").write_text("")
    code, _, err = cli("prewarm", "vec_add", "--cache-dir", str(tmp_path / "file"))
    assert (code, "is a file; remove it" in err) == (3, True), err


def test_the_cache_option_counts_wherever_it_stands(cli, cache_dir, tmp_path):
    other = str(tmp_path / "other")
    assert cli("cache", "--cache-dir", other, "dir")[1] == f"{other}\n"
    assert cli("cache", "dir", "--cache-dir", other)[1] == f"{other}\n"


def test_what_not_cached_names_can_be_prewarmed(cli, compiler, variant, target):
    def hint(op, package):
        source = variant.source.replace(package=package)
        with config.using(compile="never"), pytest.raises(NotCached) as e:
            jit.ensure(variant._replace(op=op, source=source), target)
        return str(e.value).partition("jitkern prewarm ")[2].partition(" ")[0]

    assert hint("mylib::scale", "mypkg.scale") == "mypkg"
    assert hint("mylib::scale", "") == "mylib::scale"
    assert hint("jitkern::vec_add", "jitkern.kernels") == "vec_add"


@pytest.mark.long
@pytest.mark.parametrize("module", ["kernel", "__init__", "ops", "top-level"])
def test_the_command_that_not_cached_names_mends_it(cli, package, tmp_path, module):
    name = f"mended_{module.strip('_').replace('-', '_')}"
    package(name, **({} if module == "top-level" else {module: op_text(name, "f", GOOD)}))
    declared = f"{name}.{module}".removesuffix(".__init__")
    if module == "top-level":
        declared = f"module_{name}"
        text = op_text(name, "f", GOOD).replace("k.cpp", f"{name}/k.cpp")
        (tmp_path / f"{declared}.py").write_text(text)
    sys.path.insert(0, str(tmp_path))
    importlib.import_module(declared)
    op = OPS[f"{name}::f"]
    with config.using(compile="never"):
        with pytest.raises(NotCached) as e:
            op(torch.ones(3))
        _, _, command = str(e.value).partition("jitkern ")
    target = command.split()[3].rstrip(".")
    source = op.sources["cpu"][0]
    code, out, err = cli(*command.split()[:3], target, "--json")
    assert code == 0, err
    assert [r["op"] for r in last_json(out)["results"] if r["status"] == "built"][:1] == [op.name]
    with config.using(compile="never"):
        variant = Variant(op.name, source, "f", (("T", "f32"),))
        assert jit.ensure(variant, Target.current("cpu"))


@pytest.mark.long
def test_an_op_of_a_script_has_no_command(run_python, tmp_path):
    (tmp_path / "k.cpp").write_text('extern "C" void f(T* out, const T* x) {}\n')
    done = run_python(
        op_text("scripted", "f", GOOD) + "f(torch.ones(3))\n", JITKERN_COMPILE="never"
    )
    assert "declare the op in a module, which `jitkern prewarm MODULE` imports" in done.stderr


@pytest.mark.long
def test_another_machines_cpu_is_skipped(cli):
    for arch in ("aarch64", "banana"):
        target = f"cpu-{arch}-torch2.13.0"
        report = last_json(cli("prewarm", "vec_add", "--target", target, "--json")[1])
        assert (report["built"], report["skipped"]) == (0, 4)
        assert "host code is built on its own platform" in report["results"][0]["reason"]


@pytest.mark.long
def test_clear_leaves_the_layers_alone(cli, cache_dir, tmp_path):
    cli("prewarm", "vec_add")
    with config.using(cache_dir=tmp_path / "user", system_cache=(cache_dir,)):
        assert "0 entries" in cli("cache", "clear", "--yes")[2]
        assert cli("prewarm", "vec_add", "--refresh")[0] == 0
    assert len(list(cache_dir.glob("v1/*/vec_add.f*"))) == 3


def test_an_untrusted_cache_exits_3(cli, cache_dir):
    cache_dir.mkdir()
    cache_dir.chmod(0o777)
    for arguments in (("prewarm", "vec_add"), ("cache", "ls"), ("cache", "clear", "--yes")):
        code, _, err = cli(*arguments)
        assert (code, "is not trusted" in err) == (3, True), err


def test_a_bad_setting_exits_2_and_names_it(tmp_path, run_python):
    done = subprocess.run(
        [sys.executable, "-m", "jitkern", "cache", "dir"], env={"JITKERN_VERIFY": "maybe", "HOME": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, "JITKERN_VERIFY=`maybe`" in done.stderr) == (2, True), done.stderr


def test_list_is_the_shipped_ops(cli):
    ops = {op["op"]: op for op in last_json(cli("list", "jitkern", "--json")[1])["ops"]}
    assert set(ops) == shipped()
    assert ops["jitkern::softmax"]["kernels"] == {
        "cuda": ["nvrtc", "triton", "extension"],
        "cpu": ["cc"],
    }
    assert ops["jitkern::softmax"]["differentiable"] and ops["jitkern::vec_add"]["fusible"]
    assert "jitkern::softmax(Tensor x, int dim=-1, float scale=1.0) -> Tensor" in cli("list")[1]
