"""One build of an Extension for all its ops, and the libraries that it is linked with."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import last_json

from jitkern import jit, testing
from jitkern.errors import CompileError, DeclarationError, LoadError
from jitkern.source.kinds import Extension, Variant
from jitkern.target import Target

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")

MODULE = """
#include <Python.h>
%s
static PyObject* one(PyObject*, PyObject*) { return PyLong_FromLong(ONE); }
static PyObject* two(PyObject*, PyObject*) { return PyLong_FromLong(2); }
static PyMethodDef methods[] = {{"one", one, METH_VARARGS, nullptr}, {"two", two, METH_VARARGS, nullptr}, {}};
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "m", nullptr, -1, methods};
extern "C" __attribute__((visibility("default"))) PyObject* PyInit_binding() { return PyModule_Create(&module); }
"""
KERNEL = """
from jitkern.declare import Extension, kernel
for name in ("one", "two"):
    op = kernel(f"shared_build::{name}(Tensor x) -> int", cpu=Extension("binding.cpp", function=name))
    op.reference(lambda x: 0)
"""
CALL = "import sys, torch, shared_build.kernel; print(torch.ops.shared_build.{}(torch.ones(1)))"
CPU = Target.current("cpu")


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "shared_build"
    folder.mkdir()
    (folder / "kernel.py").write_text(KERNEL)
    (folder / "__init__.py").touch()
    (folder / "binding.cpp").write_text(MODULE % "#define ONE 1")
    return folder


@pytest.fixture
def compiles(tmp_path, monkeypatch):
    """Have a C++ compiler that notes each unit that it compiles; return how many it noted."""
    noted = tmp_path / "compiles"
    script = tmp_path / "c++.sh"
    script.write_text(
        f'case " $* " in *" -c "*binding.cpp*) echo unit >> {noted};; esac\nexec c++ "$@"\n'
    )
    monkeypatch.setenv("CXX", f"sh {script}")
    testing.set_settings(monkeypatch)
    return lambda: noted.read_text().count("unit")


def variant(folder, function="one", op="", **options):
    source = Extension("binding.cpp", folder=str(folder), function=function, **options)
    return Variant(op or f"t::{function}", source)


@pytest.mark.long
def test_two_ops_compile_once(folder, compiles):
    assert [jit.loaded(variant(folder, name), CPU)() for name in ("one", "two")] == [1, 2]
    assert compiles() == 1
    assert jit.key_of(variant(folder), CPU) == jit.key_of(variant(folder, "two"), CPU)


@pytest.mark.long
def test_two_ops_of_two_processes_compile_once(folder, compiles):
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", CALL.format(name)],
            cwd=folder.parent, stdout=subprocess.PIPE, text=True,
        )
        for name in ("one", "two")
    ]  # fmt: skip
    assert [process.communicate()[0] for process in processes] == ["1\n", "2\n"]
    assert compiles() == 1


@pytest.mark.long
def test_two_ops_compile_once_in_a_prewarm(folder, compiles, tmp_path, run_python):
    words = ["prewarm", "shared_build", "--target", str(CPU), "--jobs", "2", "--json"]

    def prewarm():
        code = f"import sys; from jitkern.cli import main; sys.exit(main({words!r}))"
        done = run_python(code, PYTHONPATH=str(tmp_path))
        assert done.returncode == 0, done.stderr
        return last_json(done.stdout)

    told = prewarm()
    assert (told["built"], told["failed"], compiles()) == (1, 0, 1)
    for name, answer in (("one", "1\n"), ("two", "2\n")):
        done = run_python(CALL.format(name), JITKERN_COMPILE="never")
        assert done.stdout == answer, done.stderr
    assert (prewarm()["hits"], compiles()) == (1, 1)


@pytest.mark.long
def test_a_missing_function_is_an_error_with_a_list(folder, compiles):
    jit.ensure(variant(folder), CPU)
    says = r"of t::three has no function `three`; .*: one, two"
    with pytest.raises(DeclarationError, match=says):
        jit.loaded(variant(folder, "three"), CPU)
    assert compiles() == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("options", "name"),
    [({}, "binding"), ({"name": "mylib.binding"}, "mylib.binding")],
    ids=["of the file", "given"],
)
def test_the_cache_calls_it_by_its_own_name(folder, options, name):
    entry = jit.ensure(variant(folder, **options), CPU)
    assert (entry.op, entry.variant) == (name, "extension")
    assert entry.manifest.meta["module"] == "binding"


def library(folder, text, *flags):
    """Compile a library into the folder `lib` of an Extension."""
    (folder / "lib").mkdir(exist_ok=True)
    (folder / "lib" / "foo.cpp").write_text(f'extern "C" int foo() {{ return {text}; }}\n')
    command = ["c++", "-fPIC", *flags, "foo.cpp"]
    subprocess.run(command, cwd=folder / "lib", check=True)


SHARED = ("-shared", "-Wl,-soname,libfoo.so", "-o", "libfoo.so")
USES = MODULE % 'extern "C" int foo();\n#define ONE foo()'
LINKED = {"libraries": ["foo"], "library_dirs": ["lib"]}


@pytest.mark.long
def test_a_shared_library_is_found_beside_its_module(folder, tmp_path, run_python):
    (folder / "binding.cpp").write_text(USES)
    library(folder, 5, *SHARED)
    assert jit.loaded(variant(folder, **LINKED), CPU)() == 5
    entry = jit.ensure(variant(folder, **LINKED), CPU)
    binary = (entry.path / entry.manifest.meta["artifact"]).read_bytes()
    assert b"libfoo.so\0" in binary and str(tmp_path).encode() not in binary
    assert "<library 0>/libfoo.so" in entry.manifest.inputs["source"]["closure"]
    elsewhere = shutil.copytree(folder, tmp_path / "elsewhere" / "shared_build")
    shutil.rmtree(folder)
    code = f"""
from jitkern import jit
from jitkern.source.kinds import Extension, Variant
from jitkern.target import Target
source = Extension("binding.cpp", folder={str(elsewhere)!r}, function="one", **{LINKED!r})
print(jit.loaded(Variant("t::one", source), Target.current("cpu"))())
"""
    done = run_python(code, JITKERN_COMPILE="never")
    assert done.stdout == "5\n", done.stderr


@pytest.mark.long
def test_a_process_takes_no_other_library_of_the_same_name(folder, tmp_path):
    (folder / "binding.cpp").write_text(USES)
    copy = shutil.copytree(folder, tmp_path / "copy")
    library(folder, 5, *SHARED, "-Wl,-soname,libfoo.so.2")
    shutil.copytree(folder / "lib", copy / "lib")
    for place in (folder, copy):
        assert jit.loaded(variant(place, op=f"t::{place.name}", **LINKED), CPU)() == 5
    for place in (folder, copy):
        library(place, 7, *SHARED, "-Wl,-soname,libfoo.so.2")
        says = r"another libfoo\.so .*: start a new process, or "
        with pytest.raises(LoadError, match=says) as e:
            jit.loaded(variant(place, **LINKED), CPU)
    assert e.value.whole


@pytest.mark.long
@pytest.mark.parametrize("kind", ["shared", "archive", "whole path", "flags"])
def test_what_it_is_linked_with_is_in_the_key_by_content(folder, kind):
    (folder / "binding.cpp").write_text(USES)
    lib = folder / "lib"
    options = {
        "shared": LINKED,
        "archive": LINKED,
        "whole path": {"ldflags": [f"{lib}/libfoo.a"]},
        "flags": {"ldflags": [f"-L{lib}", "-lfoo"]},
    }[kind]

    def built(number):
        if kind == "shared":
            library(folder, number, *SHARED)
        else:
            library(folder, number, "-c")
            (lib / "libfoo.a").unlink(missing_ok=True)
            subprocess.run(["ar", "rc", "libfoo.a", "foo.o"], cwd=lib, check=True)
        return jit.ensure_and_tell(variant(folder, **options), CPU)[1]

    assert (built(1), built(1), built(2)) == (True, False, True)


@pytest.mark.long
def test_a_library_that_lies_nowhere_has_a_hint(folder):
    with pytest.raises(CompileError, match="finds no -lfoo: name its directory .library_dirs"):
        jit.ensure(variant(folder, libraries=["foo"]), CPU)


@pytest.mark.long
def test_a_library_without_a_name_of_its_own_has_a_hint(folder):
    (folder / "binding.cpp").write_text(USES.replace("foo", "bar"))
    library(folder, 5, "-Dfoo=bar", "-shared", "-o", "libbar.so")
    with pytest.raises(LoadError, match=r"libbar\.so: cannot open.* -Wl,-soname,NAME") as e:
        jit.loaded(variant(folder, libraries=["bar"], library_dirs=["lib"]), CPU)
    assert e.value.whole


@pytest.mark.long
def test_libraries_of_the_system_need_no_directory(folder):
    (folder / "binding.cpp").write_text(MODULE % "#define ONE 1")
    entry = jit.ensure(variant(folder, libraries=["m"]), CPU)
    assert Path(*[*entry.manifest.inputs["source"]["closure"]]).name == "binding.cpp"
