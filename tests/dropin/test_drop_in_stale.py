"""Staleness: what `load_inline` and `load` compile and link from files that the call does not name outright."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from inline_modules import MODULE, compiles, entries, module, value

import jitkern
from jitkern import testing
from jitkern.compilers import compiler_for
from jitkern.compilers.cuda import toolkit
from jitkern.compilers.dependencies import read_list
from jitkern.compilers.torch_extension import compile_and_link
from jitkern.compilers.torch_extension.inline import Inline
from jitkern.dropin import memo
from jitkern.source.includes import expanded, words

pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")


# Staleness: what is compiled and linked from files that the call does not name outright.

HEADER = "#define STR(x) #x\n#define H(x) STR(N/x)\n#include H(x.h)"
HAS = "#if __has_include(%s)\n#endif"


@pytest.fixture
def searched(files, monkeypatch):
    """The closure of a unit `k.cpp` of this text, `{d}` in flags being its folder."""

    def closure_of(text, variables=(), **flags):
        folder = files(k_dot_cpp=text)
        for name, found in dict(variables).items():
            monkeypatch.setenv(name, found.format(d=folder))
        testing.set_settings(monkeypatch)
        given = {name: tuple(words([flag.format(d=folder)])) for name, flag in flags.items()}
        places = (str(folder / "k.cpp"),)
        source = Inline(("k.cpp",), name="k", places=places, **given)
        return compiler_for(source).closure(source)

    return closure_of


@pytest.mark.parametrize(
    ("text", "told", "changed"),
    [
        ("#include <x.h>", {"variables": {"CPATH": "{d}/a:{d}/b"}}, "a/x.h"),
        ("#include <x.h>", {"variables": {"CPLUS_INCLUDE_PATH": "{d}/b"}}, "b/x.h"),
        ("#include <x.h>", {"variables": {"NVCC_APPEND_FLAGS": "-I{d}/a -I{d}/b"}}, "a/x.h"),
        (HAS % "<y.h>", {"variables": {"CPATH": "{d}/a"}}, "a/y.h"),
        (HAS % "<y.h>", {"cflags": "--include-directory={d}/a"}, "a/y.h"),
        (HAS % "<y.h>", {"cflags": "-Wp,-I{d}/a"}, "a/y.h"),
        (HAS % "<y.h>", {"cuda_cflags": "-Xcompiler=-isystem,{d}/a"}, "a/y.h"),
        (HAS % "<y.h>", {"cflags": "@{d}/flags"}, "a/y.h"),
        ("#define H <y.h>\n" + HAS % "H", {"cflags": "-I{d}/a"}, "a/y.h"),
        (HAS % "H", {"cflags": "-I{d}/a '-DH=<y.h>'"}, "a/y.h"),
        ("#include <x.h>", {"cflags": "-isystem {d}/b -I{d}/a"}, "a/x.h"),
        ('#include "x.h"', {"cflags": "-I{d}/b -iquote {d}/a"}, "a/x.h"),
        ("#define H <x.h>\n#include H", {"cflags": "-I{d}/a -I{d}/b"}, "a/x.h"),
        ("#include_next <x.h>", {"cflags": "-I{d}/b -I{d}/a"}, "a/x.h"),
        ("", {"cflags": "@{d}/flags"}, "flags"),
        ("", {"cflags": "-fprofile-use={d}/profile"}, "profile"),
        ('#include "D.h"\n', {}, "D.h"),
        ("", {"ldflags": "-L{d}/b -l:libq.a"}, "b/libq.a"),
        ("", {"ldflags": "-L{d}/a -L{d}/b -Wl,-Bstatic,-lq"}, "a/libq.a"),
        ("", {"ldflags": "-L{d}/b -lq"}, "b/libq.so"),
        ("", {"ldflags": "-L{d}/c -lscript"}, "b/libq.a"),
        ("", {"ldflags": "-Wl,--whole-archive,{d}/b/libq.a,--no-whole-archive"}, "b/libq.a"),
        ("", {"ldflags": "-Wl,--version-script={d}/a/map"}, "a/map"),
        ("", {"ldflags": "@{d}/linked"}, "b/libq.a"),
        ("", {"ldflags": "-lq", "variables": {"LIBRARY_PATH": "{d}/b"}}, "b/libq.a"),
    ],
)
def test_what_a_compiler_or_linker_would_find_is_in_the_key(text, told, changed, searched, files):
    folder = files(b__x_dot_h="", a__keep="", b__libq_dot_a="1")
    files(flags=f"-I{folder}/a", linked=f"-L{folder}/b -lq", c__libscript_dot_so="INPUT(-lq)")
    told = {**told, "variables": {**told.get("variables", {})}}
    if "script" in str(told):
        told["variables"]["LIBRARY_PATH"] = f"{folder}/b"
    before = searched(text, **told)
    assert searched(text, **told).files == before.files
    path = folder / changed
    path.write_text(f"{path.read_text()} " if path.exists() else "")
    assert searched(text, **told).files != before.files


def test_response_files_are_read_in_their_order(files):
    folder = files(**{name: f"-D{name}" for name in "dcba"}, e="@e @a -De")
    told = list(expanded([f"@{folder}/{name}" for name in "bdac"] + ["@e"]))
    assert [word for word in told if word.startswith("-D")] == [
        "-Db",
        "-Dd",
        "-Da",
        "-Dc",
        "-De",
        "-Da",
    ]


def test_a_shared_library_is_there_or_not(searched, files):
    folder = files(libs__liba_dot_so="")
    found = []
    for body in (b"1", b"2"):
        (folder / "libs" / "liba.so").write_bytes(b"\x7fELF" + bytes(12) + b"\3\0" + body)
        found.append(searched("", ldflags="-L{d}/libs -la").files)
    (folder / "libs" / "liba.so").unlink()
    assert found[0] == found[1] != searched("", ldflags="-L{d}/libs -la").files


def test_headers_of_torch_that_are_named_count_by_their_version(searched):
    include = Path(torch.__file__).parent / "include"
    found = searched("#include <torch/extension.h>\n", cflags=f"-isystem {include}")
    assert list(found.files) == ["k.cpp"]
    assert list(found.versions.values()) == [torch.__version__]


def test_only_headers_of_the_toolkit_count_by_its_version(searched, files, monkeypatch):
    folder = files(src__x_dot_h="", include__cuda_dot_h="")
    found = []
    for number in (1, 2):
        (folder / "src" / "x.h").write_text(f"#define H {number}")
        told = {"cflags": "-I{d}/src -I{d}/include", "variables": {"CUDA_HOME": "{d}"}}
        found.append(searched("#include <x.h>\n#include <cuda.h>", **told))
    assert found[0].files != found[1].files
    assert not found[0].versions
    home = files(cuda__include__cuda_dot_h="") / "cuda"
    told = {"cflags": "-I{d}/cuda/include", "variables": {"CUDA_HOME": str(home)}}
    assert searched("#include <cuda.h>", **told).versions == {
        "include": f"cuda {torch.version.cuda}"
    }


@pytest.mark.long
def test_a_folder_around_the_toolchain_makes_none_of_it_ours(cache_dir):
    text = MODULE % "#include <vector>\n#include <c10/macros/Macros.h>"
    around = [str(Path(torch.__file__).parents[2]), "/usr/include"]
    flags = {"extra_cflags": ["-DPREFIX=/usr"], "extra_include_paths": around}
    jitkern.load_inline("drop_in_around", text, no_implicit_headers=True, **flags)
    (entry,) = entries(cache_dir)
    assert json.loads((entry / "manifest.json").read_text())["meta"]["opened"] == {}


@pytest.mark.long
def test_another_place_has_its_own_watched_header(files):
    source = MODULE % "#include <outer.h>\n"
    for place, number in (("v1", 1), ("v2", 2), ("v1", 1)):
        folder = files(
            **{f"{place}__N__x_dot_h": value(number), f"{place}__c__outer_dot_h": HEADER}
        )
        roots = [f"{folder}/{place}", f"{folder}/{place}/c"]
        made = jitkern.load_inline(
            "drop_in_watched", source, no_implicit_headers=True, extra_include_paths=roots
        )
        assert made.answer() == number


@pytest.mark.long
def test_another_checkout_has_its_own_computed_header(files, cache_dir):
    for name in ("v1", "v2"):
        files(
            **{f"{name}__k_dot_cpp": MODULE % "#include CONFIG", f"{name}__c_dot_h": value(name[1])}
        )
    arguments = {"extra_cflags": ['-DCONFIG=\\"c.h\\"']}
    for name in ("v1", "v2", "v1"):
        assert jitkern.load("drop_in_checkout", f"{name}/k.cpp", **arguments).answer() == int(
            name[1]
        )
    assert len(entries(cache_dir)) == 2


@pytest.mark.long
@pytest.mark.parametrize("text", [HEADER, "#pragma GCC system_header\n" + HEADER])
def test_a_computed_header_that_appears_earlier_or_changes(text, files):
    folder = files(b__N__x_dot_h=value(1), a__keep="", c__outer_dot_h=text)
    flags = {"extra_cflags": [f"-isystem {folder}/{name}" for name in "abc"]}

    def build():
        before = compiles()
        source = MODULE % "#include <outer.h>\n"
        m = jitkern.load_inline("drop_in_computed", source, no_implicit_headers=True, **flags)
        return m.answer(), compiles() - before

    assert [build(), build()] == [(1, 1), (1, 0)]
    files(b__N__x_dot_h=value(2))
    assert [build(), build()] == [(2, 1), (2, 0)]
    files(a__N__x_dot_h=value(3))
    assert [build(), build()] == [(3, 1), (3, 0)]


@pytest.mark.long
def test_a_header_edited_in_mid_compile_is_compiled_again(files, monkeypatch):
    folder = files(N__x_dot_h=value(1))
    make = compile_and_link.make

    def edited(*arguments):
        built = make(*arguments)
        files(N__x_dot_h=value(2))
        return built

    monkeypatch.setattr(compile_and_link, "make", edited)
    source = HEADER
    flags = {"extra_cflags": [f"-I{folder}"]}
    assert module("drop_in_edited", source, **flags).answer() == 1
    monkeypatch.undo()
    assert module("drop_in_edited", source, **flags).answer() == 2


@pytest.mark.long
def test_a_header_named_by_one_toolchain_is_that_of_the_place(files, monkeypatch):
    folder = files(known__outer_dot_h="#include <x.h>\n")
    monkeypatch.setattr(toolkit, "include_directories", lambda: [folder / "known"])
    for name in ("v1", "v2"):
        files(**{f"{name}__x_dot_h": value(name[1])})
        roots = [str(folder / "known"), str(folder / name)]
        source = "#include <outer.h>"
        assert module("drop_in_place", source, extra_include_paths=roots).answer() == int(name[1])


@pytest.mark.long
@pytest.mark.parametrize("listed", [True, False])
def test_a_file_that_incbin_reads_through_a_macro_is_watched(files, listed, monkeypatch, caplog):
    folder = files(data_dot_bin="1")
    assembly = '.section .rodata\\nblob:\\n.incbin \\"" DIR "/data.bin\\"\\n.byte 0\\n.previous'
    source = f'#define DIR "{folder}"\nasm("{assembly}");\n'
    source += 'extern "C" const char blob[] __attribute__((visibility("hidden")));\n#define VALUE *blob - 48'
    if not listed:
        monkeypatch.setattr(compile_and_link, "hides_binaries", lambda *_: True)
    found = []
    for number in (1, 1, 2):
        files(data_dot_bin=str(number)) if number == 2 else None
        before = compiles()
        found.append((module("drop_in_incbin", source).answer(), compiles() - before))
    assert found == [(1, 1), (1, 0 if listed else 1), (2, 1)]
    assert listed != ("compiled again at each start" in caplog.text)


@pytest.mark.long
def test_a_header_of_an_absolute_path_is_read_at_each_call(files):
    """By way of a link, which leads elsewhere the second time."""
    folder = files(v1_dot_h=value(1), v2_dot_h=value(2))
    for number in (1, 2):
        (folder / "x.h").unlink(missing_ok=True)
        (folder / "x.h").symlink_to(f"v{number}.h")
        assert module("drop_in_absolute", f'#include "{folder}/x.h"').answer() == number


def test_a_path_is_read_from_a_list_as_gcc_writes_it(tmp_path):
    folder = tmp_path / "a b#c$d$$e: f"
    folder.mkdir()
    (folder / "x.h").touch()
    (tmp_path / "k.cpp").write_text(f'#include "{folder}/x.h"\n')
    subprocess.run(
        ["c++", "-E", "-MD", "-MF", "k.d", "-o", "k.i", "k.cpp"], cwd=tmp_path, check=True
    )
    assert str(folder / "x.h") in read_list(tmp_path / "k.d")


@pytest.mark.parametrize(
    "flag", ["-Wl,--whole-archive,/x/libq.a", "-Wp,-I/x", '-DX="/x"', "-Wl,-lq"]
)
def test_a_flag_that_may_name_a_file_leaves_no_record(flag):
    call = {
        "name": "x", "texts": [""], "files": ["main.cpp"], "places": [], "include": [],
        "cuda_cflags": [],
    }  # fmt: skip
    assert memo.shortcut_key({**call, "cflags": ["-O2"], "ldflags": []})
    assert not memo.shortcut_key({**call, "cflags": [], "ldflags": [flag]})
