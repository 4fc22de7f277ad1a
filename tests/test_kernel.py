import pytest

from jitkern.errors import DeclarationError
from jitkern.kernel import Cpp, Cuda, Extension, Include, Triton, Variant


@pytest.mark.parametrize(
    ("kind", "file"),
    [(Cuda, "x.cpp"), (Cpp, "x.cu"), (Triton, "x.cu"), (Cuda, ("a.cu", "b.cu")), (Cuda, ())],
    ids=str,
)
def test_wrong_files_are_refused(kind, file):
    with pytest.raises(DeclarationError, match=f"{kind.__name__} takes one file ending in"):
        kind(file)


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
