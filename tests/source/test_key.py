import os
from pathlib import Path

import pytest

from jitkern import config, testing
from jitkern.cache.key import canonical, digest_of
from jitkern.compilers.torch_extension.inline import Inline
from jitkern.jit import key_of
from jitkern.source.closure import closure_of
from jitkern.source.key import make_key
from jitkern.source.kinds import Cuda, Extension, Include, Unit, Variant
from jitkern.target import Target


@pytest.fixture
def variant(source):
    mine = source.replace(environment=("MINE",))
    options = (("num_warps", 4),)
    return Variant("test::scale", mine, "scale", (("T", "f32"),), ("*f32:16",), options)


def key(variant, target, flags=("-O2",)):
    return make_key(variant, target, flags, closure_of(variant.source))


PERTURBED = {  # the fields of the variant, of its source and of the target that change; and flags
    "op": ({"op": "test::other"}, {}, {}),
    "function": ({"function": "other"}, {}, {}),
    "template value": ({"template": (("T", "f16"),)}, {}, {}),
    "template name": ({"template": (("U", "f32"),)}, {}, {}),
    "template type": ({"template": (("T", 1),)}, {}, {}),
    "signature": ({"signature": ("*f32",)}, {}, {}),
    "options": ({"options": (("num_warps", 8),)}, {}, {}),
    "flags": ({}, {}, {}, "-O3"),
    "flag order": ({}, {}, {}, "-O2", "-O3"),
    "min_compiler": ({}, {"min_compiler": "12"}, {}),
    "root version": ({}, {"include": (Include("x", "1"),)}, {}),
    "environment names": ({}, {"environment": ("MINE", "YOURS")}, {}),
    "device arch": ({}, {}, {"arch": "x86_64_v3"}),
    "torch": ({}, {}, {"torch": "2.14.0"}),
    "cuda": ({}, {}, {"device": "cuda", "arch": "sm_90", "cuda": "130"}),
    "platform": ({}, {}, {"platform": "linux_x86_64"}),
    "abi": ({}, {}, {"abi": "cxx11_glibc2.36"}),
}


@pytest.mark.parametrize("change", PERTURBED)
def test_change_of_an_input_changes_the_key(change, variant, target):
    of_variant, of_source, of_target, *flags = PERTURBED[change]
    other = variant._replace(source=variant.source.replace(**of_source), **of_variant)
    found = key(other, target._replace(**of_target), tuple(flags) or ("-O2",))
    assert found.digest != key(variant, target).digest


def test_every_input_is_perturbed_above_or_below(variant, target):
    inputs = key(variant, target).inputs
    assert {*inputs} == {"op", "flags", "target", "variant", "source", "environment", "schema"}
    assert {*inputs["source"]} == {"kind", "files", "closure", "versions", "min_compiler"}
    assert {*inputs["variant"]} == {"function", "template", "signature", "options"}


def units(*flags):
    return {"files": ("a.cpp", "b.cpp"), "unit_flags": (Unit("a.cpp", flags),)}


@pytest.mark.parametrize(
    "fields",
    [{"flags": ("-march=native",)}, {"flags": ("-mtune=native",)}, units("-march=native")],
    ids=["march", "mtune", "of a unit"],
)
def test_the_processor_is_in_the_key_where_a_flag_depends_on_it(
    fields, variant, target, monkeypatch
):
    for file in ("a.cpp", "b.cpp"):
        Path(variant.source.folder, file).touch()
    native = variant._replace(source=variant.source.replace(**fields))
    keys = []
    for flags in ("sse4_2 avx2", "sse4_2 avx2 avx512f"):
        testing.set_processor(monkeypatch, flags)
        keys.append([key(v, target).digest for v in (variant, native)])
    assert keys[0][0] == keys[1][0]
    assert keys[0][1] != keys[1][1]


@pytest.mark.parametrize(
    ("flags", "elsewhere", "changed"),
    [
        ("-arch=native", "", "gpus"),
        ("-arch native", "", "gpus"),
        ("-O3 --gpu-architecture=native", "", "gpus"),
        ("--gpu-architecture native -g", "", "gpus"),
        ("", "-arch=native", "gpus"),
        ("-Xcompiler -march=native", "", "processor"),
        ("-Xcompiler=-march=native -arch=native", "", "gpus processor"),
        ("", "-Xcompiler=-march=native", "processor"),
        ("-arch=sm_90 -Dnative", "", ""),
    ],
)
def test_nvcc_flags_may_put_gpus_and_processor_into_the_key(
    flags, elsewhere, changed, tmp_path, monkeypatch
):
    """`elsewhere` is the text of a variable."""
    (tmp_path / "k.cu").touch()
    words = flags.split()
    monkeypatch.setenv("NVCC_APPEND_FLAGS", elsewhere)
    testing.set_settings(monkeypatch)
    told = {"folder": str(tmp_path), "environment": ["NVCC_APPEND_FLAGS"]}
    sources = [
        Extension("k.cu", function="k", flags=words, **told),
        Inline(["k.cu"], name="k", texts=["int k;"], with_cuda=True, cuda_cflags=words),
    ]
    cpu = Target.current("cpu")
    inputs = []
    for processor, arch in (("sse4_2", "sm_80"), ("sse4_2 avx2", "sm_90")):
        testing.set_processor(monkeypatch, processor)
        gpu = Target("cuda", arch, "130", "2.13.0")
        monkeypatch.setattr(Target, "visible", lambda gpu=gpu: [cpu, gpu, gpu])
        keys = [key_of(Variant("test::k", source), cpu) for source in sources]
        inputs.append([one.inputs["source"] for one in keys])
    for one, other in zip(*inputs):
        differing = [name for name in ("gpus", "processor") if one.get(name) != other.get(name)]
        assert " ".join(differing) == changed


def test_the_processor_is_not_in_the_key_of_device_code(tmp_path):
    (tmp_path / "k.cu").touch()
    source = Cuda("k.cu", folder=str(tmp_path), flags=["-Xcompiler=-march=native"])
    target = Target("cuda", "sm_90", "130", "2.13.0")
    assert "processor" not in key(Variant("test::k", source), target).inputs["source"]


def test_change_of_the_schema_changes_the_key(variant, target, monkeypatch):
    before = key(variant, target).digest
    monkeypatch.setattr("jitkern.source.key.SCHEMA", 99)
    assert key(variant, target).digest != before


def test_change_of_a_declared_variable_changes_the_key(variant, target):
    before = key(variant, target).digest
    with config.using(environment={"MINE": "1"}):
        assert key(variant, target).digest != before


@pytest.mark.parametrize("name", ["scale.cpp", "new.h", "sub/deep.inc"])
def test_change_of_a_file_changes_the_key(name, variant, target):
    path = os.path.join(variant.source.folder, "scale.cpp")
    with open(path, "a") as file:
        file.write('#include "new.h"\n#include "sub/deep.inc"\n')
    before = key(variant, target).digest
    path = os.path.join(variant.source.folder, name)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "a") as file:
        file.write("// changed\n")
    assert key(variant, target).digest != before


def test_change_of_the_kind_changes_the_key(variant, target):
    place = {"folder": variant.source.folder, "environment": ("MINE",)}
    other = variant._replace(source=Extension("scale.cpp", function="f", **place))
    assert key(other, target).digest != key(variant, target).digest


def test_what_must_not_change_the_key(variant, target, tmp_path, monkeypatch):
    before = key(variant, target).digest
    folder = tmp_path / "elsewhere" / "scale"
    folder.mkdir(parents=True)
    (folder / "scale.cpp").write_text(variant.source.paths[0].read_text())
    (folder / "kernel.py").write_text("# the launch function is no input of the compiler\n")
    os.utime(folder / "scale.cpp", (0, 0))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", "/nowhere")
    moved = variant._replace(source=variant.source.replace(folder=str(folder)))
    with config.using(environment={"CFLAGS": "-O0", "CXX": "clang++", "PATH": "/bin"}):
        assert key(moved, target).digest == before


def test_name_is_readable_and_ends_in_the_digest(variant, target):
    k = key(variant, target)
    assert k.name == f"test.scale.f32-{k.digest[:16]}"
    assert key(variant._replace(op="jitkern::scale"), target).name.startswith("scale.f32-")
    assert k.target == "cpu-x86_64-torch2.13.0"


def test_canonical_json_ignores_order():
    assert canonical({"b": 1, "a": [1, "x"]}) == b'{"a":[1,"x"],"b":1}'
    assert digest_of({"b": 1, "a": 2}) == digest_of({"a": 2, "b": 1})
