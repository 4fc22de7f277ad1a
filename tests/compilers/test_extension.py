"""Extensions: units compiled where they lie, side by side, each with its own flags, and linked."""

import json
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from cpp_texts import MODULE, library
from helpers import LONGEST, alive, run_threads, until, write_files

from jitkern import config, jit
from jitkern.compilers.cuda import toolkit
from jitkern.compilers.torch_extension import commands, compile_and_link
from jitkern.errors import CompileError, CompilerNotFound, TargetError
from jitkern.source.kinds import Extension, Unit, Variant
from jitkern.target import Target

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")
TWO = {
    "main.cpp": MODULE % "int other();\n#define ANSWER VALUE * 100 + other()",
    "other.cpp": "int other() { return VALUE; }\n",
}
CPU = Target.current("cpu")


@pytest.fixture
def variant(tmp_path):
    folder = tmp_path / "k"
    folder.mkdir()

    def make(text, function="answer", **options):
        (folder / "k.cpp").write_text(text)
        source = Extension("k.cpp", folder=str(folder), function=function, **options)
        return Variant("test::k", source)

    return make


@pytest.fixture
def of_library(variant):
    """An Extension of the library `jitkern_test_extension` with these flags."""
    text, function = library("jitkern_test_extension"), "jitkern_test_extension::answer"
    return lambda *flags: variant(text, function, flags=flags)


@pytest.mark.long
def test_a_library_that_registers_itself(of_library):
    v = of_library("-DANSWER=7")
    assert jit.loaded(v, CPU)(torch.zeros(3)) == 10
    assert len(list(jit.ensure(v, CPU).path.iterdir())) == 3  # manifest, library, log


@pytest.mark.long
def test_a_python_module_carries_the_python_tag(variant):
    v = variant(MODULE % "")
    assert jit.loaded(v, CPU)() == 42
    assert f"_cp3{sys.version_info.minor}" in jit.ensure(v, CPU).path.parent.name


def test_a_warm_start_runs_no_tool(variant, run_python):
    v = variant(MODULE % "")
    jit.ensure(v, CPU)
    code = f"""
import os, json, subprocess, sys
def refuse(*a, **k): raise AssertionError("a subprocess")
subprocess.Popen.__init__ = refuse
from jitkern import jit, stats
from jitkern.source.kinds import Extension, Variant
from jitkern.target import Target
v = Variant("test::k", Extension("k.cpp", folder={v.source.folder!r}, function="answer"))
print(json.dumps([jit.loaded(v, Target.current("cpu"))(), "torch.utils.cpp_extension" in sys.modules, stats()["compiles"]]))
"""
    done = run_python(code, PATH="/nonexistent")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [42, False, 0]


def test_a_syntax_error_names_file_and_line(variant):
    says = r"its Extension of test::k for cpu-.*k/k\.cpp:2:.*error: "
    with pytest.raises(CompileError, match=says):
        jit.ensure(variant("\nint x = ;\n"), CPU)


def test_another_torch_is_refused(variant):
    release = "2.10.0" if torch.__version__.startswith("2.11") else "2.11.0"
    target = f"cpu-x86_64-torch{release}"
    says = rf"cannot build for {target}.* here: .* the Torch they run on \(this is"
    with pytest.raises(TargetError, match=says):
        jit.ensure(variant(MODULE % ""), Target.parse(target))


def test_another_platform_is_refused(variant):
    with pytest.raises(TargetError, match="cannot build for cpu-riscv64-.* on linux_"):
        jit.ensure(variant(MODULE % ""), CPU._replace(arch="riscv64"))


@pytest.mark.long
def test_the_manifest_names_the_compiler_and_its_version(variant):
    compiler = jit.ensure(variant(MODULE % ""), CPU).manifest.compiler
    version = subprocess.check_output([config.current().cxx, "--version"], text=True)
    assert compiler == {"name": "cc", "version": version.splitlines()[0]}
    with pytest.raises(CompilerNotFound, match="needs cc 99 or newer"):
        jit.ensure(variant(MODULE % "", min_compiler="99"), CPU)


def test_what_is_no_module_is_an_error_that_says_what_to_do(variant):
    with pytest.raises(CompileError, match=r'no Python module `k`.* function="ns::name"'):
        jit.ensure(variant("int x;"), CPU)


@pytest.mark.long
def test_a_file_that_the_key_does_not_cover_is_refused(variant, tmp_path):
    header = tmp_path / "elsewhere" / "hidden.h"
    header.parent.mkdir()
    header.write_text("")
    text = MODULE % f'#define HIDDEN "{header}"\n#include HIDDEN'
    with pytest.raises(CompileError, match=r"opened .*hidden\.h, which the cache key does not cov"):
        jit.ensure(variant(text), CPU)


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("-g",)], ids=["plain", "debugged"])
def test_an_artifact_holds_no_path_of_this_machine(of_library, tmp_path, flags):
    v = of_library("-DANSWER=sizeof(where())", *flags)
    shared = tmp_path / "include"
    shared.mkdir()
    (shared / "where.h").write_text("inline const char* where_h() { return __FILE__; }\n")
    text = '#include "where.h"\nconst char* where() { return where_h() + *__FILE__; }\n'
    unit = Path(v.source.folder, "k.cpp")
    unit.write_text(text + unit.read_text())
    entry = jit.ensure(v, CPU)
    binary = entry.read(entry.manifest.meta["artifact"])
    assert b"./where.h" in binary and b"./k.cpp" in binary
    assert str(tmp_path).encode() not in binary
    assert str(Path(torch.__file__).parent).encode() not in binary


@pytest.mark.long
def test_two_ops_may_take_functions_of_one_source(variant):
    v = variant(library("jitkern_test_shared"), "jitkern_test_shared::answer")
    first = jit.loaded(v, CPU)
    second = jit.loaded(v._replace(op="test::other"), CPU)
    assert first(torch.zeros(3)) == second(torch.zeros(3)) == 45


@pytest.mark.long
def test_a_namespace_registered_twice_is_an_error_and_no_abort(of_library, run_python):
    v = of_library()
    code = f"""
from jitkern import config, jit
from jitkern.errors import DeclarationError
from jitkern.source.kinds import Extension, Variant
from jitkern.target import Target
for value in (1, 2):
    source = Extension("k.cpp", folder={v.source.folder!r}, function={v.source.function!r}, flags=[f"-DANSWER={{value}}"])
    try:
        jit.loaded(Variant("test::k", source), Target.current("cpu"))
    except DeclarationError as e:
        print(e)
"""
    done = run_python(code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("the Extension of test::k registers the namespace `jitkern_test_")


# Several units.


@pytest.fixture
def write(tmp_path):
    """Write files into a folder of their own; returns it."""

    def write(files):
        folder = tmp_path / "ops" / "k"
        write_files(folder, files)
        return str(folder)

    return write


@pytest.fixture
def two(write):
    """An Extension of two units, each with a VALUE of its own."""
    units = [Unit("main.cpp", ("-DVALUE=4",)), Unit("other.cpp", ("-DVALUE=2",))]
    return Variant("test::two", Extension(units, folder=write(TWO), function="answer"))


@pytest.fixture
def compiler_script(tmp_path):
    """Make CXX a shell script that does this first to each unit; `$unit` is its name."""

    def make(script):
        path = tmp_path / "c++.sh"
        path.write_text(
            f'cd "$(dirname "$0")" || exit 1; unit=; place="$OLDPWD"\n'
            f'case "$*" in *" -c "*main.cpp*) unit=main;; *" -c "*other.cpp*) unit=other;; esac\n'
            f'[ -z "$unit" ] || {{\n{script}\n}}\ncd "$place" && exec c++ "$@"\n'
        )
        return f"sh {path}"

    return make


@pytest.mark.long
def test_each_unit_has_its_own_flags(two):
    assert jit.loaded(two, CPU)() == 402


@pytest.mark.long
def test_units_of_one_name_in_several_folders(write):
    folder = write({"a/unit.cpp": TWO["main.cpp"], "b/unit.cpp": TWO["other.cpp"]})
    units, flags = ["a/unit.cpp", "b/unit.cpp"], ["-DVALUE=3"]
    source = Extension(units, folder=folder, function="answer", flags=flags)
    assert jit.loaded(Variant("test::folders", source), CPU)() == 303


@pytest.mark.long
def test_units_are_compiled_at_once(two, compiler_script):
    script = """
touch $unit.begun
[ $unit = main ] && theirs=other || theirs=main
for i in $(seq 6000); do [ -e $theirs.begun ] && break; sleep 0.05; done
[ -e $theirs.begun ] || { echo "error: $theirs did not begin"; exit 1; }
"""
    with config.using(jobs=2, cxx=compiler_script(script)):
        assert jit.ensure(two, CPU)


@pytest.mark.long
def test_no_more_compilers_run_at_once_than_there_are_jobs(two, compiler_script):
    """Of all builds in this process together."""
    script = "mkdir running || { echo 'error: two at once'; exit 1; }; sleep 0.2; rmdir running"
    errors = []

    def build(op):
        try:
            jit.ensure(two._replace(op=op), CPU)
        except CompileError as e:
            errors.append(e)

    with config.using(jobs=1, cxx=compiler_script(script)):
        run_threads(*(partial(build, f"test::{n}") for n in range(2)))
    assert not errors


def test_a_unit_that_fails_is_named_and_ends_the_others(two, tmp_path, compiler_script):
    Path(two.source.folder, "other.cpp").write_text("int other() { return VALUE; }\n\nint x = ;\n")
    script = """
if [ $unit = main ]; then echo $$ > main.new; mv main.new main.pid; sleep 1000; touch lived; fi
for i in $(seq 6000); do [ -e main.pid ] && break; sleep 0.05; done
"""
    says = r"its Extension of test::two .*k/other\.cpp:3:\d+: error"
    held = config.using(jobs=2, cxx=compiler_script(script))
    with held, pytest.raises(CompileError, match=says) as e:
        jit.ensure(two, CPU)
    assert not (tmp_path / "lived").exists()
    assert "other.cpp" in e.value.command
    until(lambda: not alive(int((tmp_path / "main.pid").read_text())))  # its parent was ninja


@pytest.mark.long
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=str)
def test_the_end_of_the_process_ends_all_units(two, tmp_path, compiler_script, end):
    script = "echo $$ > $unit.new; mv $unit.new $unit.pid; sleep 1000"
    code = f"""
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # a runner may have had us ignore it
from jitkern import config, jit
from jitkern.source.kinds import Extension, Variant
from jitkern.target import Target
source = Extension({list(two.source.files)!r}, folder={two.source.folder!r}, function="answer")
with config.using(jobs=2, cxx={compiler_script(script)!r}):
    jit.ensure(Variant("test::two", source), Target.current("cpu"))
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    pids = [tmp_path / f"{unit}.pid" for unit in ("main", "other")]
    try:
        until(lambda: all(pid.exists() for pid in pids) or process.poll() is not None)
        process.send_signal(end)
        _, said = process.communicate(timeout=LONGEST)
    finally:
        process.kill()
        process.communicate()
    if end == signal.SIGINT:
        assert said.splitlines()[-1] == "KeyboardInterrupt"
        assert not any(alive(int(pid.read_text())) for pid in pids)
    until(lambda: not any(alive(int(pid.read_text())) for pid in pids))


@pytest.mark.long
@pytest.mark.parametrize(
    ("edited", "changes"),
    [("other.h", True), ("../include/shared.h", True), ("unused.h", False)],
)
def test_an_edit_rebuilds_what_includes_the_file(write, edited, changes):
    headers = {"other.h": "#define OTHER 2\n", "../include/shared.h": "#define SHARED 3\n"}
    other = '#include "other.h"\n#include <shared.h>\nint other() { return OTHER + SHARED; }\n'
    folder = write({**TWO, **headers, "unused.h": "", "other.cpp": other})
    units, flags = ["main.cpp", "other.cpp"], ["-DVALUE=1"]
    v = Variant("test::edited", Extension(units, folder=folder, function="answer", flags=flags))
    assert jit.loaded(v, CPU)() == 105
    Path(folder, edited).write_text("#define OTHER 7\n#define SHARED 7\n")
    entry, built = jit.ensure_and_tell(v, CPU)
    assert built == changes
    assert (edited in entry.manifest.inputs["source"]["closure"]) == changes


# CUDA, as far as no GPU is needed.

CUDA = {
    "binding.cpp": "int from_cuda();\n#define ANSWER from_cuda()\n"
    + library("jitkern_test_extension"),
    "kernel.cu": "__global__ void fill(int* out) { *out = VALUE; }\n"
    "const char* where() { return __FILE__; }\n"
    "int from_cuda() { fill<<<1, 1>>>(nullptr); return *where(); }\n",
}


@pytest.fixture
def cuda(write):
    units = ["binding.cpp", Unit("kernel.cu", ("-DVALUE=5", "--use_fast_math"))]
    function = "jitkern_test_extension::answer"
    source = Extension(units, folder=write(CUDA), function=function, environment=["LIBRARY_PATH"])
    return Variant("test::cuda", source)


@pytest.mark.long
@pytest.mark.skipif(not toolkit.nvcc(), reason="needs nvcc")
def test_cpp_and_cuda_units_go_to_their_compilers(cuda, cuda_target, tmp_path):
    entry = jit.ensure(cuda, cuda_target)
    assert entry.manifest.compiler["name"] == "nvcc" and "c++" in entry.manifest.compiler
    assert entry.manifest.meta["namespaces"] == ["jitkern_test_extension"]
    log = (entry.path / "compile.log").read_text()
    cpp, cu, *_ = (line for line in log.splitlines() if line.startswith("$ "))
    assert "VALUE" not in cpp and "-gencode=arch=compute_90,code=sm_90 -O2 -DVALUE=5" in cu
    binary = entry.path / entry.manifest.meta["artifact"]
    content = binary.read_bytes()
    assert str(tmp_path).encode() not in content and b"./kernel.cu" in content
    if shutil.which("cuobjdump"):
        assert "sm_90" in subprocess.check_output(["cuobjdump", "--list-elf", binary], text=True)
    wrong = "\n__global__ void fill(int* out) { *out = ; }\n"
    Path(cuda.source.folder, "kernel.cu").write_text(wrong)
    with pytest.raises(CompileError, match=r"k/kernel\.cu\(2\): error: expected an expression"):
        jit.ensure(cuda, cuda_target)


def test_flags_that_name_an_arch_take_the_place_of_the_targets(cuda, cuda_target, monkeypatch):
    monkeypatch.setattr(commands, "nvcc", lambda: (["nvcc"], (13, 0)))
    made = []
    note = lambda build, steps, *rest: made.append(steps) or 1 / 0
    monkeypatch.setattr(compile_and_link, "run_steps", note)
    monkeypatch.setattr(Target, "visible", lambda: [CPU, cuda_target._replace(arch="sm_90")])
    native = cuda._replace(source=cuda.source.replace(flags=("-arch=native",)))
    for v in (cuda, native):
        with pytest.raises(ZeroDivisionError):
            jit.ensure(v, cuda_target._replace(arch="sm_90a"))
    named = [[word for word in steps[1].command if "arch=" in word] for steps in made]
    assert named == [["-gencode=arch=compute_90a,code=sm_90a"], ["-arch=native"]]
    with pytest.raises(TargetError, match=r"say -arch=native, which means .* \(sm_90\): leave it"):
        jit.ensure(native, cuda_target._replace(arch="sm_80"))


def test_without_nvcc_the_error_says_what_to_install(cuda, cuda_target, monkeypatch):
    monkeypatch.setattr(toolkit, "nvcc", lambda: None)
    with pytest.raises(CompilerNotFound, match="needs nvcc: install the CUDA toolkit") as e:
        jit.ensure(cuda, cuda_target)
    assert "CUDA_HOME" in e.value.remedy


def test_a_torch_without_cuda_is_named(cuda, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(TargetError, match="needs CUDA, and this Torch .* is built without CUDA"):
        jit.ensure(cuda, Target("cuda", "sm_90", "130", CPU.torch))


def test_cuda_files_for_the_cpu_are_refused(cuda, cuda_target):
    with pytest.raises(TargetError, match="it has CUDA files, and cpu-.* is no CUDA target"):
        jit.ensure(cuda, CPU)
