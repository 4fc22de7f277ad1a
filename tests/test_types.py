"""What a type checker, and so an editor, knows of jitkern: its names and no others."""

import ast
import importlib
import inspect
import subprocess
import sys
import typing

import pytest
from architecture import TREES, for_types
from helpers import REPOSITORY

import jitkern.declare
from jitkern import config
from jitkern.config import Config
from jitkern.source import kinds
from jitkern.source.kinds import SOURCES, Cpp, Extension, Source

USER = """
import jitkern
from jitkern import cache, cache_tools, runtime
from jitkern.declare import Cpp, Cuda, Extension, Include, Op, Triton, Unit, kernel

jitkern.load_inline
jitkern.ops.softmax
values, indices = jitkern.ops.topk(None, 3)
twice: Op[tuple[int, str]] = kernel("my::twice(Tensor x) -> Tensor")
twice(None)[1].upper()
cache.events.stats
cache_tools.pack


@jitkern.pointwise
def name(x: int) -> str:
    return str(x)


name(None).upper()
name(None).uper()  # wrong
jitkern.pointwise(abs, dtypes=())(None).real
jitkern.pointwise(dtype=())  # wrong
with jitkern.using(compile="never", cache_dir="/c", jobs="3", max_size=1 << 30) as settings:
    settings.jobs + 1
Cuda(["a.cu", Unit("b.cu", ("-O1",))], flags=["-O2"], include=[Include("cutlass", "4.7")])
Cpp("k.cpp", native=True, min_compiler="12")
Triton("k.py", environment=["MINE"])
Extension("k.cpp", function="f", libraries=["m"], text="")

jitkern.laod_inline  # wrong
jitkern.named  # wrong
jitkern.ops.sotfmax  # wrong
jitkern.ops.topk(None, 3)[2]  # wrong
twice(None)[0].upper()  # wrong
cache.evnts  # wrong
runtime.bindings.prepare  # wrong
cache_tools.packk  # wrong
jitkern.using(complie="never")  # wrong
jitkern.using(compile="nevr")  # wrong
jitkern.using(fsync="yes")  # wrong
settings.jobs = 3  # wrong
Cuda("k.cu", flag=["-O2"])  # wrong
Cuda("k.cu", native=True)  # wrong
Cpp("k.cpp", natvie=True)  # wrong
Cpp("k.cpp", min_compiler=12)  # wrong
Triton("k.py", flgas=["x"])  # wrong
Extension("k.cpp")  # wrong
Extension("k.cpp", function="f", library=["m"])  # wrong
"""


@pytest.mark.long
def test_a_misspelt_name_is_an_error_of_mypy(tmp_path):
    pytest.importorskip("mypy")
    (tmp_path / "jitkern").symlink_to(REPOSITORY / "jitkern")
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nfollow_imports = silent\n[mypy-torch.*,triton.*]\nfollow_imports = skip\n"
        "ignore_missing_imports = true\n"
    )
    command = [sys.executable, "-m", "mypy", "user.py", "--no-error-summary", "--cache-dir=cache"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if ": error: " in line]
    found = {int(line.split(":")[1]) for line in lines}
    wrong = {i for i, text in enumerate(USER.splitlines(), 1) if "# wrong" in text}
    assert found == wrong, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("name", ["jitkern", "jitkern.cache_tools"])
def test_a_type_checker_is_told_of_each_public_name(name):
    told = {
        alias.asname
        for node in ast.walk(TREES[name])
        if id(node) in for_types(TREES[name]) and isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert told - {"__version__"} == set(importlib.import_module(name).__all__)


def test_what_each_op_returns_is_told_by_its_schema():
    names = {"Tensor": "Tensor", "Optional[Tensor]": "Tensor | None"}
    told = {
        node.target.id: ast.unparse(node.annotation)
        for node in ast.walk(TREES["jitkern.ops"])
        if isinstance(node, ast.AnnAssign)
    }
    shipped = jitkern.declare.discover("jitkern.kernels_src")
    assert sorted(told) == sorted(op.__name__ for op in shipped)
    for name, annotation in told.items():
        returned = getattr(jitkern.ops, name).overload._schema.returns
        types = [names[str(result.type)] for result in returned]
        several = f"tuple[{', '.join(types)}]"
        assert (
            annotation == f"Op[{'None' if not types else types[0] if not types[1:] else several}]"
        )


def test_using_is_typed_with_each_setting():
    (typed,) = (
        node for node in ast.walk(TREES["jitkern.config.values"]) if isinstance(node, ast.ClassDef)
    )
    taken = {node.target.id: ast.unparse(node.annotation) for node in typed.body[1:]}
    assert taken.keys() == Config.__annotations__.keys()
    for name, annotation in taken.items():
        if annotation.startswith("Literal"):
            for value in typing.get_args(eval(annotation, vars(typing))):
                Config(**{name: value})
            with pytest.raises(ValueError, match="expected one of"):
                Config(**{name: "another"})
    assert {s.name for s in config.SETTINGS} < taken.keys()


def test_the_options_of_each_kind_of_source_are_those_of_all():
    (options,) = (
        node for node in ast.walk(TREES["jitkern.source.kinds"])
        if isinstance(node, ast.ClassDef) and node.name == "Options"
    )  # fmt: skip
    told = {node.target.id: ast.unparse(node.annotation) for node in options.body[1:]}
    shared = inspect.signature(Source.__init__).parameters.values()
    assert told == {p.name: p.annotation for p in shared if p.kind == p.KEYWORD_ONLY}
    for kind in SOURCES.values():
        listed = inspect.signature(kind).parameters
        assert list(listed)[0] == "files" and told.keys() - kinds.OURS < {*listed}
        assert not {"rest", *kinds.OURS}.intersection(listed)
    assert inspect.signature(Cpp).parameters["native"].default is False
    assert {"function", "libraries", "ldflags"} < {*inspect.signature(Extension).parameters}
