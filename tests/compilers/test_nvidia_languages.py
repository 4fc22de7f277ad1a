"""What cuTile and the CuTe DSL have in common, in their child processes; no GPU is needed."""

import os
import shutil
import sys

import pytest
import torch
from helpers import REPOSITORY
from nvidia_languages import (
    CUTE,
    CUTILE,
    HELPER,
    TARGET,
    TARGETS,
    VECTOR,
    artifact,
    in_both,
    on_meta,
    said_by_prewarm,
)

from jitkern import config
from jitkern.errors import (
    CompileError,
    CompilerNotFound,
    DeclarationError,
    LaunchError,
    NotCached,
    TargetError,
)

both = pytest.mark.parametrize(
    "language",
    [pytest.param(language, id=language.name, marks=language.needs) for language in (CUTILE, CUTE)],
)


@pytest.mark.long
@both
def test_an_arch_that_the_compiler_does_not_know_is_named(build, language):
    with pytest.raises(TargetError, match=rf"{language.compiler}\S+ does not know sm_75"):
        build(target=TARGETS["sm_75"])


# ------------------------------------------------------------------ what the key covers


@pytest.mark.long
@both
def test_a_helper_file_is_in_the_key(build, language):
    (build.folder / "helper.py").write_text(HELPER.format(2))
    first = build(language.helped)
    (build.folder / "helper.py").write_text(HELPER.format(3))
    second = build(language.helped)
    assert first.path != second.path
    assert artifact(first) != artifact(second)


OUTSIDE_BOTH = {
    "import numpy": r"`numpy` is imported, .*KIND\(..., packages={'numpy': '\d",
    "import torch": "`torch` is imported, which the cache key does not cover",
    "import other": "it is no module of the kernel's package",
    "open(FOLDER + '/other.py').read()": "opens .*other.py, which the cache key does not cover",
}
OUTSIDE = {
    **OUTSIDE_BOTH,
    "from numpy import pi": "`numpy` is imported",
    "def read():\n    import numpy\nread()": "`numpy` is imported",
    "import sys\nsys.path.insert(0, FOLDER)\nimport other": "`other` is imported",
    "import importlib": "`importlib` is imported",
    "__import__('numpy')": "`numpy` is imported",
    "import pathlib\npathlib.Path(FOLDER, 'other.py').read_text()": "opens .*other.py",
    "import os\nos.system('true')": r"calls os.system",
    "import subprocess\nsubprocess.run(['true'])": "calls subprocess.Popen",
}


@pytest.mark.parametrize(("language", "text"), in_both(OUTSIDE, OUTSIDE_BOTH))
def test_what_no_key_covers_is_refused(build, language, text, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "other.py").write_text("X = 1\n")
    whole = f"FOLDER = {str(tmp_path / 'elsewhere')!r}\n{text}\n{language.scale}"
    with pytest.raises(CompileError, match=OUTSIDE[text].replace("KIND", language.kind.__name__)):
        build(whole)


@pytest.mark.long
@both
def test_the_languages_own_folders_are_not_used(build, language, tmp_path, monkeypatch):
    name = "CUDA_TILE_CACHE_DIR" if language is CUTILE else "CUTE_DSL_CACHE_DIR"
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(name, str(tmp_path / "own"))
    with config.using(environment={**os.environ}):
        build(**({"environment": [name]} if language is CUTILE else {}))
    assert not (tmp_path / "home").exists()
    assert not (tmp_path / "own").exists()


# ------------------------------------------------------------------ refusals

DECLARED = [
    (CUTILE, {"flags": ["-O3"]}, r"options stand at `@ct.kernel\(...\)`"),
    (CUTILE, {"include": ["more"]}, "a file in Python includes none"),
    (CUTE, {"include": ["more"]}, "a file in Python includes none"),
    (CUTE, {"packages": ["numpy"]}, 'say the versions, as in {"numpy": '),
    (CUTE, {"flags": ["--gpu-arch sm_90a"]}, "takes --opt-level"),
    (CUTE, {"flags": ["--enable-tvm-ffi"]}, "takes --opt-level"),
    (CUTE, {"environment": ["CUTE_DSL_ARCH"]}, "jitkern sets it"),
    (CUTE, {"environment": ["CUTE_DSL_KEEP"]}, "changes nothing that is compiled"),
    (CUTE, {"package_versions": {}}, "takes environment, .*, packages, strided, text, got package"),
]


@pytest.mark.parametrize(("language", "keyword", "reason"), DECLARED)
def test_a_declaration_passes_on_what_changes_the_code_alone(language, keyword, reason):
    with pytest.raises(DeclarationError, match=reason):
        language.kind("k.py", **keyword)


def refused(text, decorator, **own):
    """Return keywords for `build` and the error of each case. Both languages have the first seven."""
    end = text.count("\n") + 1
    return {
        "name": ({"function": "j"}, f"k.py: error: it has no {decorator} function `j`; it has: k"),
        "count": ({"signature": (VECTOR,)}, r"takes 3 arguments \(out, x, by\), got 1"),
        "constant": ({"template": ()}, r"needs the constant `B`, .*k.k\[{'B': …}\]"),
        "unknown": ({"template": (("B", 1), ("C", 1))}, "has no parameter `C`"),
        "syntax": ({"text": f"{text}x = (\n"}, rf"k.py\({end}\): error: SyntaxError: "),
        "raises": ({"text": f"{text}1 / 0\n"}, rf"k.py\({end}\): error: ZeroDivisionError"),
        "exits": ({"text": f"{text}import os\nos._exit(3)\n"}, "process ended with status 3"),
        **own,
    }


def edited(language, *parts):
    """The kernel, each of whose first parts is the second."""
    text = language.scale
    for old, new in zip(parts[::2], parts[1::2]):
        text = text.replace(old, new)
    return text


REFUSED = {
    CUTILE: refused(
        CUTILE.scale, "@ct.kernel",
        rank=({"signature": (VECTOR, "*f32:16:16,16:4,=1", "float")}, r"k.py\(6\): error: .*does not match the array rank 2"),
        tuple=({"text": edited(CUTILE, "by,", "by: tuple[int, int],"), "signature": (VECTOR, VECTOR, "int")}, "`by` is a tuple or a list: give each item a parameter"),
    ),
    CUTE: refused(
        CUTE.scale, "@cute.jit",
        no_constant=({"template": (("B", 1), ("by", 2.0)), "signature": (VECTOR, VECTOR)}, "`by` is no constant: annotate it as cutlass.Constexpr"),
        unannotated=({"text": edited(CUTE, "by: Float32, B", "by, B")}, "`by` is not annotated, and gets a number, of the class float: annotate it as cutlass.Int32"),
        tuple=({"text": edited(CUTE, "by: Float32, B", "by: tuple[Int32, Int32], B")}, r"`by` is annotated as tuple\["),
        number=({"signature": (VECTOR, "int", "float")}, "`x` is annotated as .*Tensor, and gets a number"),
        tensor=({"signature": (VECTOR, VECTOR, VECTOR)}, "`by` is annotated as .*Float32, and gets a tensor.*annotate it as cute.Tensor"),
        bool=({"signature": (VECTOR, "*bool:16:16:=1", "float")}, r"`x` is a tensor of bool: pass a view of its bytes, `x.view\(torch.uint8\)`"),
        stream=({"text": edited(CUTE, ", stream: cuda.CUstream", "", ", stream=stream", "")}, "the last parameter of `k` must be the stream"),
        asks=({"text": edited(CUTE, "    blocks", "    cutlass.utils.HardwareInfo()\n    blocks")}, r"k.py\(\d+\): error: it asks the GPU of this machine"),
        blocks=({"text": edited(CUTE, "block=[B", "min_blocks_per_mp=2, block=[B")}, "it asks the GPU of this machine while it is compiled"),
        language=({"text": edited(CUTE, "x[i] * by", "'a'")}, r"k.py\(9\): error: "),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("language", "case"), in_both(REFUSED[CUTILE], REFUSED[CUTE]))
def test_what_is_not_compiled_is_refused_with_its_reason(build, language, case):
    given, reason = REFUSED[language][case]
    with pytest.raises(CompileError, match=reason) as raised:
        build(**given)
    assert "\x1b[" not in str(raised.value)


@both
def test_a_missing_package_is_named_with_the_line_of_pip(build, language, monkeypatch):
    monkeypatch.setattr(sys, "path", [str(REPOSITORY)])
    with pytest.raises(CompilerNotFound, match=rf'pip install "jitkern\[{language.name}\]"'):
        build()


@both
def test_nothing_is_compiled_where_compiling_is_off(build, language):
    with config.using(compile="never"), pytest.raises(NotCached, match=r"test::k \(f32.B64\)"):
        build()


# ------------------------------------------------------------------ launches

WRONG = [
    ([on_meta(4)], {}, "takes tensors and numbers, not list"),
    ((1, 2), {}, "not tuple"),
    (None, {}, "not NoneType `None`"),
    (on_meta(4, dtype=torch.complex64), {}, "no kernel knows torch.complex64"),
]
WRONG_IN_CUTILE = [
    *WRONG,
    (on_meta(4), {"block": 1}, "launched with `block`, and a cuTile kernel takes a `grid` alone"),
    (on_meta(4), {"num_ctas": 2}, r"options like num_ctas stand at `@ct.kernel\(...\)`"),
]
WRONG_IN_CUTE = [
    *WRONG,
    (on_meta(4), {"grid": 128}, "with `grid`, and a function of CuTe takes no keyword: it"),
    (on_meta(4), {"num_warps": 2}, "with `num_warps`, and a function of CuTe takes no keyword"),
]


@pytest.mark.parametrize(
    ("language", "arg", "keywords", "reason"),
    [
        *((CUTILE, *wrong) for wrong in WRONG_IN_CUTILE),
        *((CUTE, *wrong) for wrong in WRONG_IN_CUTE),
    ],
)
def test_an_argument_that_cannot_be_passed_is_refused(language, arg, keywords, reason):
    with pytest.raises(LaunchError, match=reason):
        language.classes(arg, **keywords)


@both
@pytest.mark.parametrize(
    "value", [torch.float32, "a", None, print, lambda x: x, float("nan"), (1, 2)]
)
def test_a_constant_is_a_number(language, value):
    with pytest.raises(LaunchError, match="constant B=.* must be a bool, an int or a finite float"):
        language.classes(template=(("B", value),))


@pytest.mark.long
@both
def test_a_number_that_does_not_fit_names_the_argument(declare, language):
    def launch(k, x, by):
        out = torch.empty_like(x)
        k.k[{"B": 64}](out, x, 1 << 40, **language.launch)
        return out

    said = said_by_prewarm(declare(launch, text=language.scale_by_int), 64)
    assert r"argument 3 (`by`) must be an integer that fits i32" in said


@pytest.mark.long
@both
def test_a_lookup_imports_no_package_of_the_language(build, language, run_python):
    entry, kind = build(), language.kind.__name__
    package = f"jitkern.compilers.{language.name}"
    code = (
        f"import sys\nfor name in {language.modules}: sys.modules[name] = None\n"
        f"from jitkern import jit\nfrom jitkern.source.kinds import {kind}, Variant\n"
        "from jitkern.target import Target\n"
        f"source = {kind}('k.py', folder={str(build.folder)!r})\n"
        f"v = Variant('test::k', source, 'k', (('B', 64),), {(VECTOR, VECTOR, 'float')!r})\n"
        f"print(jit.ensure(v, Target.parse({str(TARGET)!r})).path)\n"
        f"print(*(m for m in sys.modules if m.startswith({package!r})))\n"
    )
    path, modules = run_python(code, JITKERN_COMPILE="never").stdout.splitlines()
    assert path == str(entry.path)
    assert modules.split() == [package, f"{package}.compiler"]


@pytest.mark.long
@both
def test_processes_and_folders_give_equal_bytes(build, language, tmp_path):
    """Each compile has a process of its own, whose hashes have a seed of their own."""
    (build.folder / "helper.py").write_text(HELPER.format(2))
    found = set()
    for number in range(20 if language is CUTILE else 8):
        folder = build.folder if number % 2 else tmp_path / f"other{number}"
        if folder != build.folder:
            folder.mkdir()
            shutil.copy(build.folder / "helper.py", folder)
        with config.using(cache_dir=tmp_path / f"cache{number}"):
            found.add(artifact(build(language.helped, folder=folder)))
    assert len(found) == 1
