"""Staleness: what `load_inline` and `load` compile and link from files that the call does not name outright."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cpp_texts import MODULE
from inline_modules import entries, module, value
from torch.utils import cpp_extension

import jitkern
from jitkern import testing
from jitkern.compilers import compiler_for
from jitkern.compilers.dependencies import read_list
from jitkern.compilers.torch_extension.inline import Inline
from jitkern.dropin import memo
from jitkern.errors import NotCached
from jitkern.source.flags import words

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
        ("#include <x.h>", {"cflags": "-isystem {d}/b -I{d}/a"}, "a/x.h"),
        ('#include "x.h"', {"cflags": "-I{d}/b -iquote {d}/a"}, "a/x.h"),
        ("#define H <x.h>\n#include H", {"cflags": "-I{d}/a -I{d}/b"}, "a/x.h"),
        ("#include_next <x.h>", {"cflags": "-I{d}/b -I{d}/a"}, "a/x.h"),
        ('#include "D.h"\n', {}, "D.h"),
        ("", {"ldflags": "-L{d}/b -l:libq.a"}, "b/libq.a"),
        ("", {"ldflags": "-L{d}/a -L{d}/b -Wl,-Bstatic,-lq"}, "a/libq.a"),
        ("", {"ldflags": "-L{d}/b -lq"}, "b/libq.so"),
        ("", {"ldflags": "-L{d}/c -lscript"}, "c/libscript.so"),
        ("", {"ldflags": "-Wl,--whole-archive,{d}/b/libq.a,--no-whole-archive"}, "b/libq.a"),
        ("", {"ldflags": "-Wl,--version-script={d}/a/map"}, "a/map"),
        ("", {"ldflags": "-lq", "variables": {"LIBRARY_PATH": "{d}/b"}}, "b/libq.a"),
    ],
)
def test_what_a_compiler_or_linker_would_find_is_in_the_key(text, told, changed, searched, files):
    folder = files(b__x_dot_h="", a__keep="", b__libq_dot_a="1")
    files(c__libscript_dot_so="INPUT(-lq)")
    before = searched(text, **told)
    assert searched(text, **told).files == before.files
    path = folder / changed
    path.write_text(f"{path.read_text()} " if path.exists() else "")
    assert searched(text, **told).files != before.files


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
    assert len(entries(cache_dir)) == 1


@pytest.mark.long
def test_another_checkout_has_its_own_computed_header(files, cache_dir):
    for n in (1, 2):
        unit, header = MODULE % "#include CONFIG", value(n)
        files(**{f"v{n}__k_dot_cpp": unit, f"v{n}__c_dot_h": header})
    flags = ['-DCONFIG=\\"c.h\\"']
    for n in (1, 2, 1):
        m = jitkern.load("drop_in_checkout", f"v{n}/k.cpp", extra_cflags=flags)
        assert m.answer() == n
    assert len(entries(cache_dir)) == 2


# What the key cannot cover is for Torch.


@pytest.fixture
def torchs(monkeypatch):
    """The calls that reach Torch's own function."""
    calls = []
    build = lambda *args, **told: calls.append((args, told)) or "Torch's"
    monkeypatch.setattr(cpp_extension, "load_inline", build)
    return calls


UNKEYED = [  # the text, flags, and what the warning names
    ("", {"extra_cflags": ["@{d}/flags"]}, "the flag `@{d}/flags`"),
    ("", {"extra_cflags": ["-O2 -flto"]}, "the flag `-flto`"),
    ("", {"extra_cflags": ["-fprofile-use={d}/profile"]}, "the flag `-fprofile-use={d}/profile`"),
    ("", {"extra_ldflags": ["-Wl,-O1", "-Wl,@{d}/linked"]}, "the flag `-Wl,@{d}/linked`"),
    ("", {"extra_ldflags": ["-L{d} -flto"]}, "the flag `-flto`"),
    ("", {"extra_cflags": ["-fplugin={d}/p.so"]}, "the flag `-fplugin={d}/p.so`"),
    ("#define H <y.h>\n" + HAS % "H", {}, "`__has_include` of a macro"),
    ('asm(".incbin \\"{d}/flags\\"");', {}, "`.incbin`"),
    ("#include <outer.h>", {"extra_include_paths": ["{d}"]}, "{d}/outer.h has `__has_include`"),
]


@pytest.mark.parametrize(("text", "told", "named"), UNKEYED)
def test_what_no_key_covers_is_built_by_torch(text, told, named, files, torchs, cache_dir, caplog):
    folder = files(flags="-O1", profile="", linked="", outer_dot_h=HAS % "H")
    told = json.loads(json.dumps(told).replace("{d}", str(folder)))
    text, named = (t.replace("{d}", str(folder)) for t in (text, named))
    call = ("drop_in_unkeyed", text), {"no_implicit_headers": True, **told}
    never = pytest.raises(NotCached, match=f"is never in the cache: .*{named}")
    with jitkern.using(compile="never"), never:
        jitkern.load_inline(*call[0], **call[1])
    assert not torchs
    for patched in (False, True):
        with jitkern.patch_extensions() if patched else contextlib.nullcontext():
            function = cpp_extension.load_inline if patched else jitkern.load_inline
            assert function(*call[0], **call[1]) == "Torch's"
        assert torchs.pop() == call and not torchs
        (warning,) = caplog.messages
        assert re.search(f"`drop_in_unkeyed` is left to Torch, .*{named}.* key does not", warning)
        caplog.clear()
    assert not [*cache_dir.glob("v1/*/*/manifest.json")]


@pytest.mark.long
@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEADER, {"extra_include_paths": ["{d}"]}),
        ("#include <outer.h>", {"extra_include_paths": ["{d}"]}),
        ("#pragma GCC system_header\n" + HEADER, {"extra_cflags": ["-isystem {d}"]}),
        ('asm(".inc" "bin \\"{d}/N/x.h\\"");', {}),
        ("", {"extra_ldflags": ["-L{d}/libs -lscript"]}),
    ],
)
def test_what_a_build_opens_beyond_its_key_is_for_torch(
    text, told, files, torchs, cache_dir, caplog
):
    folder = files(N__x_dot_h="#define X 1", outer_dot_h=HEADER)
    (folder / "t.c").write_text("int t;")
    subprocess.run(["cc", "-c", "t.c"], cwd=folder, check=True)
    files(libs__libscript_dot_so=f"INPUT({folder}/t.o)")
    told = json.loads(json.dumps(told).replace("{d}", str(folder)))
    assert module("drop_in_opened", text.replace("{d}", str(folder)), **told) == "Torch's"
    (warning,) = caplog.messages
    assert re.search(rf"opened {folder}/(N/x\.h|t\.o), which the cache key does not", warning)
    assert not entries(cache_dir)
    assert len(torchs) == 1


@pytest.mark.long
def test_torch_really_builds_what_no_key_covers(files, monkeypatch, tmp_path, cache_dir):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = files(flags="-DANSWER=7")
    assert module("drop_in_by_torch", extra_cflags=[f"@{folder}/flags"]).answer() == 7
    assert (tmp_path / "drop_in_by_torch" / "drop_in_by_torch.so").is_file()
    assert not entries(cache_dir)


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
