from pathlib import Path

import pytest
from helpers import write_files

from jitkern import kernels_src
from jitkern.compilers.dependencies import check
from jitkern.errors import CompileError, DeclarationError
from jitkern.source.closure import closure_of, closures_of
from jitkern.source.kinds import Cpp, Cuda, Include, Triton, shared_include


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr("jitkern.source.includes.SITE", str(tmp_path / "site"))
    folder = tmp_path / "kernels" / "k"
    write_files(folder, {"k.cu": '#include "near.cuh"\n#include <cstdio>\n', "near.cuh": ""})
    return folder


def of_folder(folder, file="k.cu", **declared):
    return Cuda(file, folder=str(folder), **declared)


def labels(source):
    return sorted(closure_of(source).files)


NEAR = ["k.cu", "near.cuh"]
CLOSURES = {  # other files than k.cu, which includes near.cuh; what the source declares; what is in
    "what includes reach": (
        dict.fromkeys(("kernel.py", "table.bin", "other.cu", "other.cuh", "sub/near.cuh"), ""), {}, NEAR,
    ),
    **{
        f"the whole folder for `{line}`": (
            {"near.cuh": f"{line}\n", "kernel.py": "", "table.bin": "", "other.cuh": ""}, {},
            [*NEAR, "other.cuh", "table.bin"],
        )
        for line in (
            "#include FILE", "  #  include /* which */ FILE", "/* a */ #include FILE", "%:include FILE",
            "#include_next FILE",
        )
    },
    "no header of the system": (
        {"near.cuh": "#include <stdio.h>"}, {"flags": ["-isystem", "/usr/include"]}, NEAR,
    ),
    **{
        f"no more for `{line}`": ({"near.cuh": f"{line}\n#endif", "other.cuh": ""}, {}, NEAR)
        for line in (
            "#ifdef __has_include", "#if defined(__has_include)",
            "#ifndef __has_include\n#define __has_include(x) 0",
        )
    },
    **{
        f"what {' '.join(flags)} includes": ({"other.cuh": "", "more.cuh": ""}, {"flags": flags}, [*NEAR, "other.cuh"])
        for flags in (["-include", "other.cuh"], ["-include=other.cuh"], ["--pre-include=other.cuh"])
    },
    **{
        f"what __has_include{between!r} asks for": (
            {"near.cuh": f'#if __has_include{between}"other.cuh" )\n#endif', "other.cuh": ""}, {}, [*NEAR, "other.cuh"],
        )
        for between in ("(", "( ", "/* a */ (", " \\\n(")
    },
    "each header of the name that #include_next has": (
        {"near.cuh": "#include_next <x.h>", "../first/x.h": "", "../second/x.h": ""},
        {"include": ["../first", "../second"]}, ["../first/x.h", "../second/x.h", *NEAR],
    ),
    "what lies beside a file of a subfolder": (
        {"sub/s.cu": '#include "beside.cuh"', "sub/beside.cuh": ""}, {"files": "sub/s.cu"}, ["sub/beside.cuh", "sub/s.cu"],
    ),
    "no logs, hidden files, caches and environments": (
        {"near.cuh": "#include FILE", **dict.fromkeys((
            "train.log", ".git/config", "venv/pyvenv.cfg", "venv/x.h", "cache/CACHEDIR.TAG", "cache/x.h"), "")}, {}, NEAR,
    ),
    "headers of the shared folder beside": (
        {"near.cuh": "  #  include <a.cuh> // why\n", "../include/a.cuh": '#include "b.cuh"', "../include/b.cuh": ""},
        {}, ["../include/a.cuh", "../include/b.cuh", *NEAR],
    ),
    "what is below #if 0": (
        {"near.cuh": "#if 0\n#include <x.h>\n#endif", "../other/x.h": ""}, {"include": ["../other"]}, ["../other/x.h", *NEAR],
    ),
    "an include on a continued line": (
        {"near.cuh": '#include \\\n"x.h"', "../include/x.h": ""}, {}, ["../include/x.h", *NEAR],
    ),
    **{
        f"an include spelled {line!r}": ({"k.cu": f"{line}\n", "a.cuh": ""}, {}, ["a.cuh", "k.cu"])
        for line in (
            '\ufeff#include "a.cuh"', '/* of two\nlines */ #include "a.cuh"',
            '#/**/include/**/"a.cuh"', '\v#\finclude\v"a.cuh"',
        )
    },
    "files that include each other": ({"near.cuh": '#include "k.cu"'}, {}, NEAR),
    **{
        f"no file for {flag}": ({}, {"flags": [flag]}, NEAR)
        for flag in (
            "-fno-lto", "-fprofile-generate", "-fprofile-dir=/tmp", "-DX=@x", "-DX=a,@b", "--coverage",
            "-Wl,-rpath,/tmp", "-Wno-error=x", "-fsanitize=address", "-ffile-prefix-map=/tmp=.",
            "-plus", "--what-comes-next=/no/such/file",
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CLOSURES)
def test_exactly_what_a_build_may_read_is_in(folder, name):
    files, declared, found = CLOSURES[name]
    write_files(folder, files)
    assert labels(Cuda(**{"files": "k.cu", **declared}, folder=str(folder))) == sorted(found)


@pytest.mark.parametrize("flag", ["-I{}", "-isystem {}", "-iquote {}", "-Wp,-I,{}"])
def test_directories_that_flags_search_are_followed(folder, tmp_path, flag):
    write_files(tmp_path / "more", {"far.h": "#include <further.h>", "further.h": ""})
    (folder / "near.cuh").write_text("#include <far.h>")
    told = flag.format(tmp_path / "more").split()
    found = [Path(label).name for label in labels(of_folder(folder, flags=told))]
    assert {"far.h", "further.h"} <= {*found}


@pytest.mark.parametrize("appears", ["first", "second"])
def test_a_header_that_may_hide_a_flags_one_is_in(folder, appears):
    for name in ("first", "second"):
        (folder.parent / name).mkdir()
    (folder.parent / "second" / "x.h").write_text("")
    (folder / "near.cuh").write_text("#include <x.h>")
    flags = [f"-I{folder.parent}/first", f"-I{folder.parent}/second"]
    source = of_folder(folder, flags=flags)
    before = closure_of(source)
    (folder.parent / appears / "x.h").write_text("// other")
    assert closure_of(source).files != before.files


@pytest.mark.parametrize(
    "flag",
    ["{}", "-Wl,--version-script={}", "-Wl,-T,{}", '-DFILE="{}"', "-include {}", "-Xlinker {}"],
)
def test_a_file_that_a_flag_names_by_its_path_is_in(folder, tmp_path, flag):
    (tmp_path / "named").write_text("1")
    source = of_folder(folder, flags=flag.format(tmp_path / "named").split())
    before = closure_of(source)
    (tmp_path / "named").write_text("2")
    assert closure_of(source).files != before.files


def test_a_flags_shared_library_is_not_read(folder, tmp_path):
    (tmp_path / "x.so").write_bytes(b"\x7fELF" + bytes(12) + b"\3\0")
    found = labels(of_folder(folder, flags=[f"{tmp_path}/x.so"]))
    assert str(tmp_path / "x.so") not in found


@pytest.mark.parametrize(
    "flag",
    [
        "@{}", "-optf {}", "--options-file={}", "-Wl,@{}", "-Xcompiler @{}", "-Xcompiler=-O2,@{}",
        "--config {}", "-specs={}", "-include-pch {}", "-Xclang -include-pch", "--pch", "-pch",
        "--use-pch={}", "-fprofile-use", "-fprofile-use={}", "-fprofile-instr-use={}",
        "-fauto-profile={}", "-fbranch-probabilities", "-flto", "-flto=thin", "-Xcompiler=-flto",
        "-fplugin={}", "-fpass-plugin={}", "-Wl,-plugin,{}", "-Wp,-include,{}",
        "-fsanitize-ignorelist={}", "--what-comes-next={}",
    ],
)  # fmt: skip
def test_a_flag_that_reads_what_no_key_covers_is_refused(folder, tmp_path, flag):
    (tmp_path / "named").write_text("1")
    flags = flag.format(tmp_path / "named").split()
    with pytest.raises(DeclarationError) as caught:
        closure_of(of_folder(folder, flags=["-O2", *flags]))
    assert "reads what the cache key does not cover" in str(caught.value)
    assert any(f"the flag `{word}`" in str(caught.value) for word in flags)


REFUSED = [
    ("#embed FILE", "#embed"),
    ('#embed "table.bin"', "#embed"),
    ("/* a */ # /* b */ embed <x>", "#embed"),
    ('#if __has_embed("x")\n#endif', "__has_embed"),
    ('asm(".incbin \\"x.bin\\"");', ".incbin"),
    ('#define READ ".incbin "', ".incbin"),
    ('asm(".include\\t\\"more.s\\"");', ".include"),
    ("#if __has_include(FILE)\n#endif", "__has_include"),
    ("#if __has_include_next(FILE)\n#endif", "__has_include"),
    ("#define HAS __has_include", "__has_include"),
    ("#if __has_\\\ninclude(FILE)\n#endif", "__has_include"),
]


@pytest.mark.parametrize(("line", "name"), REFUSED)
def test_a_directive_that_reads_what_no_key_covers_is_refused(folder, line, name):
    (folder / "near.cuh").write_text(f"{line}\n")
    with pytest.raises(DeclarationError) as caught:
        closure_of(of_folder(folder))
    assert f"near.cuh has `{name}`" in str(caught.value)


@pytest.mark.parametrize(("line", "name"), REFUSED)
def test_libraries_in_versioned_roots_and_comments_may_have_it(folder, line, name):
    commented = line.replace("/*", "").replace("*/", "")
    near = f'#include <l.h>\nf("//");  /* " {commented} */'
    write_files(folder, {"../library/l.h": f"{line}\n", "near.cuh": near})
    root = Include(str(folder.parent / "library"), version="1")
    assert labels(of_folder(folder, include=[root])) == NEAR


def test_what_lies_in_usr_local_include_is_no_compilers(folder, tmp_path, monkeypatch):
    site = tmp_path / "usr" / "local" / "include"
    site.mkdir(parents=True)
    monkeypatch.setattr("jitkern.source.includes.SITE", str(site))
    (folder / "near.cuh").write_text("#include <here.h>\n#if __has_include(<asked.h>)\n#endif")
    source = of_folder(folder)
    found = [closure_of(source).files]
    for name in ("here.h", "asked.h"):
        (site / name).write_text("")
        found.append(closure_of(source).files)
    assert [len(files) for files in found] == [2, 3, 4]
    (site / "other.h").write_text("")
    with pytest.raises(CompileError, match=r"opened .*other\.h"):
        check(source, closure_of(source), [site / "other.h"], [site.parent], "ns::k")


def test_far_files_of_one_name_are_both_in(folder, tmp_path):
    write_files(tmp_path, {"a/x.h": "", "b/x.h": ""})
    near = "".join(f'#include "{tmp_path}/{name}/x.h"\n' for name in "ab")
    (folder / "near.cuh").write_text(near)
    assert len(labels(of_folder(folder))) == 4


def test_a_file_is_followed_from_each_folder_that_links_to_it(folder):
    write_files(folder, {
        "k.cu": '#include "one/x.h"\n#include "two/x.h"\n', "one/own.h": "one", "two/own.h": "two",
        "one/x.h": '#include "own.h"\n#include "loop/x.h"\n',
    })  # fmt: skip
    (folder / "two" / "x.h").symlink_to("../one/x.h")
    (folder / "one" / "loop").symlink_to(".")
    assert {"one/own.h", "two/own.h"} <= {*labels(of_folder(folder))}


def test_a_versioned_root_enters_by_version(folder, tmp_path):
    write_files(tmp_path, {"cutlass/gemm.h": "", "kernels/k/near.cuh": "#include <gemm.h>"})
    root = Include(str(tmp_path / "cutlass"), version="4.7")
    closure = closure_of(of_folder(folder, include=[root]))
    assert (closure.versions, sorted(closure.files)) == ({"cutlass": "4.7"}, NEAR)


def test_versioned_roots_of_one_name_enter_each(folder, tmp_path):
    roots = [Include(f"{tmp_path}/a/include", "1"), Include(f"{tmp_path}/b/include", "2")]
    found = closure_of(of_folder(folder, include=roots)).versions
    assert found == {"include": "1", "include 2": "2"}


def test_a_far_root_is_labelled_without_its_path(folder, tmp_path):
    write_files(tmp_path, {"a/far/x.h": "", "kernels/k/near.cuh": "#include <x.h>"})
    names = labels(of_folder(folder, include=[f"{tmp_path}/a/far"]))
    assert "<1>/x.h" in names
    assert not any(str(tmp_path) in name for name in names)


@pytest.mark.parametrize(
    ("line", "declared"),
    [
        ("#include <x.h>", {"include": ["{}/a/far"]}),
        ("#include <x.h>", {"include": ["../../a/far"]}),
        ('#include "../../a/far/x.h"', {}),
        ("#include <sub/../x.h>", {"include": ["{}/a/far"]}),
        ("#include CONFIG", {"include": ["{}/a/far"]}),
        ("", {"flags": ["-include", "../../a/far/x.h"]}),
    ],
)
def test_a_far_header_has_the_same_label_at_another_place(tmp_path, line, declared):
    closures = []
    for place in ("one", "deep/er/two"):
        here = tmp_path / place
        far = {"a/far/x.h": '#include "y.h"', "a/far/y.h": "", "a/far/sub/z.h": ""}
        write_files(here, {"kernels/k/k.cu": line, **far})
        where = {name: [word.format(here) for word in words] for name, words in declared.items()}
        closures.append(closure_of(of_folder(here / "kernels" / "k", **where)))
    assert closures[0].files == closures[1].files
    assert len(closures[0].files) > 1


def test_a_far_header_in_a_flag_has_its_roots_label(folder, tmp_path):
    write_files(tmp_path, {"far/x.h": ""})
    far = str(tmp_path / "far")
    source = of_folder(folder, include=[far], flags=[f"-include={far}/x.h"])
    assert labels(source) == ["<1>/x.h", *NEAR]


def test_two_files_that_links_bring_under_one_label_are_both_in(folder, tmp_path):
    (tmp_path / "away" / "deep").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "away" / "deep")
    texts = {folder / "x.h": "1", tmp_path / "away" / "x.h": "2"}
    (folder / "near.cuh").write_text('#include "x.h"\n#include "link/../x.h"')
    hashes = []
    for values in ("12", "32", "13", "21"):
        for path, value in zip(texts, values):
            path.write_text(value)
        hashes.append(closure_of(of_folder(folder)).files)
    assert sorted(hashes[0]) == ["k.cu", "near.cuh", "x.h", "x.h 2"]
    assert len({tuple(files.values()) for files in hashes}) == 4


def test_a_missing_source_is_named(folder):
    archive = folder / "pack.zip"
    archive.touch()
    with pytest.raises(DeclarationError, match=r"k.cu lies in the file .*/pack.zip, and .* text="):
        closure_of(of_folder(archive / "k"))
    with pytest.raises(DeclarationError, match="nothing.cu does not exist"):
        closure_of(of_folder(folder, "nothing.cu"))


def test_triton_follows_imports_of_its_package_only(tmp_path):
    kernel = "import triton\nfrom . import helper\nfrom mylib.common import f\nimport json\n"
    write_files(tmp_path / "mylib", {
        "common.py": "import torch\n", "deep.py": "", "kernels/k/helper.py": "from mylib import deep\n",
        "kernels/k/k.py": kernel, "kernels/k/unrelated.py": "",
    })  # fmt: skip
    folder = tmp_path / "mylib" / "kernels" / "k"
    found = labels(Triton("k.py", folder=str(folder), package="mylib.kernels.k"))
    assert found == ["../../common.py", "../../deep.py", "helper.py", "k.py"]


def test_jitkerns_own_python_is_followed_in_kernels_alone(folder):
    """Its version tells of the rest, which has hundreds of files."""
    place = Path(kernels_src.__file__).parent / "softmax"
    shipped = Triton("kernel.py", folder=str(place), package="jitkern.kernels_src.softmax")
    files = closure_of(shipped).files
    assert "../rows.py" in files and not [file for file in files if file.startswith("../../")]


def test_what_the_compiler_opened_must_be_covered(folder, tmp_path):
    source = of_folder(folder)
    closure = closure_of(source)
    check(source, closure, [folder / "near.cuh", "/usr/include/stdio.h"], ["/usr/include"], "ns::k")
    stray = tmp_path / "stray" / "x.h"
    with pytest.raises(CompileError, match=rf"opened {stray}.*include=\['{stray.parent}'\]"):
        check(source, closure, [stray], ["/usr/include"], "ns::k")


def test_a_header_behind_a_versioned_one_must_be_covered(folder, tmp_path):
    (folder / "config.h").write_text("")
    library = Include(str(tmp_path / "library"), version="1")
    source = of_folder(folder, include=[library])
    opened = [tmp_path / "library" / "x.h", folder / "config.h"]
    says = r"opened .*config\.h.*by an `#include` and its directory"
    with pytest.raises(CompileError, match=says):
        check(source, closure_of(source), opened, [], "ns::k")
    (folder / "near.cuh").write_text('#include "config.h"')
    check(source, closure_of(source), opened, [], "ns::k")


def test_float16_h_has_one_label_for_all_cpp_sources(tmp_path, monkeypatch):
    site = tmp_path / "site"
    shared = site / "jitkern" / "kernels_src" / "include"
    monkeypatch.setattr("jitkern.source.closure.shared_include", lambda: str(shared))
    monkeypatch.setattr("jitkern.source.kinds.shared_include", lambda: str(shared))
    shared.mkdir(parents=True)
    (shared / "float16.h").write_text("#pragma once\n")
    for folder in (tmp_path / "far" / "away" / "k", site / "k", site):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "k.cpp").write_text('#include "float16.h"\n')
        closure = closure_of(Cpp("k.cpp", folder=str(folder)))
        assert sorted(closure.files) == ["<jitkern>/float16.h", "k.cpp"]
        assert (shared / "float16.h").resolve() in closure.paths
    (shared / "float16.h").write_text("#pragma once\n\n")
    assert closure_of(Cpp("k.cpp", folder=str(folder))).files != closure.files
    (tmp_path / "far" / "away" / "include").mkdir()
    (tmp_path / "far" / "away" / "include" / "float16.h").write_text("")
    own = closure_of(Cpp("k.cpp", folder=str(tmp_path / "far" / "away" / "k")))
    assert sorted(own.files) == ["../include/float16.h", "k.cpp"]


def test_shipped_kernels_keep_the_label_of_float16_h():
    folder = str(Path(shared_include()).parent / "vec_add")
    assert labels(Cpp("vec_add.cpp", folder=folder)) == ["../include/float16.h", "vec_add.cpp"]


def test_closures_of_several_sources_are_those_of_each(tmp_path):
    texts = {
        "a/one.cpp": '#include "near.h"\n#include <root.h>\n',
        "a/two.cpp": '#include "near.h"\n',
        "a/near.h": '#include "other.h"\n',
        "a/other.h": "#define OTHER\n",
        "b/one.cpp": '#include "near.h"\n#define R <root.h>\n#include R\n',
        "b/near.h": "#define NEAR\n",
        "b/unused.h": "",
        "root/root.h": "#include <deeper/x.h>\n",
        "root/deeper/x.h": "",
    }
    write_files(tmp_path, texts)
    include = [str(tmp_path / "root")]
    sources = [
        Cpp(file, folder=str(tmp_path / folder), include=include, flags=flags)
        for folder, file, flags in (
            ("a", "one.cpp", []), ("a", "two.cpp", []), ("b", "one.cpp", []), ("a", "two.cpp", ["-g"]),
        )
    ]  # fmt: skip
    for source, found in zip(sources, closures_of(sources)):
        alone = closure_of(source)
        assert (found.files, found.paths) == (alone.files, alone.paths)
    assert len({tuple(found.files) for found in closures_of(sources)}) == 3
