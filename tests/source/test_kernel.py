import inspect
import json
import re
from pathlib import Path

import pytest

from jitkern.errors import DeclarationError
from jitkern.source.kinds import Cpp, Cuda, Extension, Include, Triton, Unit, Variant


@pytest.mark.parametrize(
    ("kind", "file"),
    [(Cuda, "x.cpp"), (Cpp, "x.cu"), (Triton, "x.cu"), (Triton, ("a.py", "b.py")), (Cuda, ())],
    ids=str,
)
def test_wrong_files_are_refused(kind, file):
    takes = "one file" if kind is Triton else "files"
    with pytest.raises(DeclarationError, match=f"{kind.__name__} takes {takes} ending in"):
        kind(file)


def test_flags_of_a_unit_come_after_those_of_all():
    source = Cuda(["a.cu", Unit("b.cu", flags=("-y",))], flags=["-x"])
    assert source.files == ("a.cu", "b.cu")
    assert (source.flags_of("a.cu"), source.flags_of("b.cu")) == (("-x",), ("-x", "-y"))
    assert source.unit("b.cu") == Cuda("b.cu", flags=["-x", "-y"], others=["a.cu"])
    assert Cuda(Unit("b.cu", ("-y",)), flags=["-x"]) == Cuda("b.cu", flags=["-x", "-y"])


@pytest.mark.parametrize(
    "source",
    [
        Cuda(["a.cu", Unit("b.cu", flags=("-y",))], include=[Include("i", "1")]),
        Cpp(["a.cpp", Unit("b.cpp", ("-y",))], native=True).unit("b.cpp"),
        Extension(["a.cpp", Unit("b.cu", ("-y",))], function="f", libraries=["m"], ldflags=["-g"]),
    ],
    ids=repr,
)
def test_fields_make_the_same_source_also_by_way_of_json(source):
    assert type(source)(**source.fields()) == source
    assert type(source)(**json.loads(json.dumps(source.fields()))) == source


def test_a_file_given_twice_is_refused():
    with pytest.raises(DeclarationError, match="given twice"):
        Cuda(["a.cu", "a.cu"])


def test_include_strings_become_includes():
    found = Cuda("x.cu", include=["a", Include("b", "1")]).include
    assert found == (Include("a"), Include("b", "1"))


@pytest.mark.parametrize(
    ("kind", "option"),
    [(Cpp, "native"), (Cpp, "openmp"), (Cpp, "strided"), (Cuda, "arch_specific")],
)
def test_an_option_of_a_source_is_a_bool(kind, option):
    with pytest.raises(DeclarationError, match=f"{option}='no': write True or False"):
        kind(f"k{kind.suffixes[0]}", **{option: "no"})


def test_sources_are_hashable_and_equal_by_value():
    assert len({Cuda("x.cu", flags=["-a"]), Cuda(["x.cu"], flags=("-a",))}) == 1


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"flags": "-O3"}, r"flags='-O3' is a string: give a list, \['-O3'\]"),
        ({"flags": {"-O3"}}, r"flags=\{'-O3'\} is a set, of another order .*: give a list"),
        ({"include": {"i"}}, "include=.* is a set"),
        ({"environment": {"CC": 1}.keys()}, "environment=.* is a set"),
        ({"library_dirs": frozenset(("a",))}, "library_dirs=.* is a set"),
        ({"flags": {"nvcc": ["-O3"]}}, r"is a dict: give a list; .* Unit\("),
        ({"flags": [["-O3"]]}, r"flags lists strings, and \['-O3'\] is not one"),
        ({"files": ["a.cpp", Unit("b.cpp", "-O3")]}, "flags='-O3' is a string"),
        ({"include": Path("i")}, "include=.* is not a list"),
        ({"include": [Path("i")]}, "include lists strings, and .*Path.* is not one"),
        ({"libraries": "foo"}, r"give a list, \['foo'\]"),
        ({"libraries": ["-lfoo"]}, "write `foo` for libfoo.so"),
        ({"libraries": ["lib/libfoo.so"]}, "whole paths in ldflags"),
        ({"library_dirs": "lib"}, "is a string"),
        ({"ldflags": "-lfoo"}, "is a string"),
        ({"environment": "CC"}, "is a string"),
        ({"function": ""}, "write `ns::name` for an op"),
        ({"function": "mylib.f"}, "`name` for a function that its PYBIND11_MODULE binds"),
        ({"function": "a::b::c"}, "write `ns::name`"),
        ({"name": "my-lib"}, "is not a name of a module"),
        ({"min_compiler": 12.8}, "min_compiler=12.8 is not a string: write '12.8'"),
    ],
    ids=str,
)
def test_a_wrong_value_is_refused_where_it_is_given(options, match):
    with pytest.raises(DeclarationError, match=match):
        Extension(**{"files": "a.cpp", "function": "f", **options})


def test_extension_with_a_namespace_is_not_pybind():
    assert Extension("x.cpp", function="f").pybind
    assert not Extension("x.cpp", function="ns::f").pybind


CUDA, TRITON = Cuda("f.cu"), Triton("f.py")
LABELS = [
    ((CUDA, "f", (("T", "f32"),)), "f32"),
    ((CUDA, "rows", (("T", "f16"), ("BLOCK", 1024))), "rows.f16.BLOCK1024"),
    ((TRITON, "f", (("BLOCK", 64),), ("*bf16:16", "i32")), "bf16.BLOCK64"),
    ((Extension("f.cpp", function="f"),), "extension"),
    ((CUDA, "f"), ""),
    ((CUDA, "f", (("SCALE", 0.5),)), "SCALE0.5"),
]


@pytest.mark.parametrize(("fields", "label"), LABELS)
def test_label_is_readable(fields, label):
    assert Variant("a::f", *fields).label == label


@pytest.mark.parametrize("kind", [Cpp, Cuda, Extension, Triton])
def test_the_help_of_a_source_explains_each_argument(kind):
    told = inspect.getdoc(kind)
    for name in inspect.signature(kind).parameters:
        assert re.search(rf"^(.*, )?{name}(, .*)?:", told, re.MULTILINE), name
