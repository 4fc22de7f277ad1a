import json

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
        Extension(["a.cpp", Unit("b.cu", ("-y",))], function="f"),
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
    assert Cuda("x.cu", include=["a", Include("b", "1")]).include == (
        Include("a"),
        Include("b", "1"),
    )


def test_sources_are_hashable_and_equal_by_value():
    assert len({Cuda("x.cu", flags=["-a"]), Cuda(["x.cu"], flags=("-a",))}) == 1


def test_extension_with_a_namespace_is_not_pybind():
    assert Extension("x.cpp", function="f").pybind
    assert not Extension("x.cpp", function="ns::f").pybind


@pytest.mark.parametrize(
    ("variant", "label"),
    [
        (Variant("a::f", Cuda("f.cu"), "f", (("T", "f32"),)), "f32"),
        (
            Variant("a::f", Cuda("f.cu"), "rows", (("T", "f16"), ("BLOCK", 1024))),
            "rows.f16.BLOCK1024",
        ),
        (
            Variant("a::f", Triton("f.py"), "f", (("BLOCK", 64),), ("*bf16:16", "i32")),
            "bf16.BLOCK64",
        ),
        (Variant("a::f", Extension("f.cpp", function="f")), "extension"),
        (Variant("a::f", Cuda("f.cu"), "f"), ""),
        (Variant("a::f", Cuda("f.cu"), "f", (("SCALE", 0.5),)), "SCALE0.5"),
    ],
)
def test_label_is_readable(variant, label):
    assert variant.label == label
