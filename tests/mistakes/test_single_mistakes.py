"""What people write by mistake: the message names it, and says what to write."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from helpers import H100, needs_nvrtc

from jitkern import cuda_kernel
from jitkern.compilers.result import compile_error
from jitkern.declare import Cpp, Triton, kernel
from jitkern.errors import CompileError, DeclarationError, LaunchError
from jitkern.source.kinds import Variant
from jitkern.target import Target

NUMBERS = itertools.count()


def schema(text="{name}(Tensor x) -> Tensor"):
    return text.format(name=f"mistakes::f{next(NUMBERS)}")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("cuda", "scale.cu", "cuda='scale.cu' is a string: write cuda=Cuda('scale.cu')"),
        ("cuda", "scale.py", "write cuda=Triton('scale.py')"),
        ("cpu", "scale.cpp", "write cpu=Cpp('scale.cpp')"),
        ("cpu", "scale", "write cpu=Cpp('scale')"),
    ],
)
def test_a_file_name_for_a_source(name, value, says):
    with pytest.raises(DeclarationError, match=re.escape(says)):
        kernel(schema(), **{name: value})


@pytest.mark.parametrize("name", ["flags", "include", "environment"])
def test_a_text_for_a_list(name):
    with pytest.raises(DeclarationError, match=re.escape(f"{name}='-O3' is a string: give a list")):
        Cpp("scale.cpp", **{name: "-O3"})


@pytest.mark.parametrize(
    ("kind", "meant"), [("cpp", "cpu"), ("cudda", "cuda"), ("tritn", "triton"), ("gpu", "cuda")]
)
def test_a_kind_of_launch_that_is_none(kind, meant):
    op = kernel(schema())
    with pytest.raises(DeclarationError, match=rf"launch\(\) takes c.*did you mean '{meant}'"):
        op.launch(kind)


def test_a_kind_of_launch_that_is_like_none():
    with pytest.raises(DeclarationError, match=r"got \('zzz',\)$"):
        kernel(schema()).launch("zzz")


@pytest.fixture
def call(tmp_path):
    """Call a C++ kernel of this text with these template arguments."""

    def run(text, template):
        (tmp_path / "f.cpp").write_text(text)
        op = kernel(schema(), cpu=Cpp("f.cpp"))
        op.sources["cpu"] = (op.sources["cpu"][0].replace(folder=str(tmp_path)),)

        @op.launch("cpu")
        def _(k, x):
            out = torch.empty_like(x)
            (k.f[template] if template else k.f)(out)
            return out

        return op(torch.ones(3))

    return run


@pytest.mark.parametrize("template", [{}, {"U": torch.float32}])
def test_a_template_argument_that_no_launch_gave(call, template):
    given = ", ".join(f"{name}=f32" for name in template) or "none"
    with pytest.raises(CompileError) as e:
        call('extern "C" void f(T* x) {}', template)
    assert 'pass it in the launch, as in k.f[{"T": ...}](...); this launch passed: ' + given in str(
        e.value
    )


def test_a_syntax_error_is_shown_in_its_line(call, tmp_path):
    with pytest.raises(CompileError) as e:
        call('extern "C" void f(float* x) {\n  x[0] = y[0];\n  x[1] = 3\n}', {})
    lines = str(e.value).split("\n")
    for line, column, text in ((2, 10, "  x[0] = y[0];"), (3, 11, "  x[1] = 3")):
        at = next(i for i, shown in enumerate(lines) if f"f.cpp:{line}:{column}: error" in shown)
        assert lines[at + 1 : at + 3] == [
            f"    {line} | {text}",
            "      | " + " " * (column - 1) + "^",
        ]


@needs_nvrtc
def test_a_syntax_error_of_a_cuda_kernel_is_shown_in_its_line(tmp_path):
    text = "__global__ void k(int* x) {\n  x[0] = y[0];\n}"
    (tmp_path / "k.cu").write_text(text)
    with pytest.raises(CompileError) as e:
        cuda_kernel(tmp_path / "k.cu", "k", target=H100).compile()
    assert re.search(r'k\.cu\(2\): error: .*"y".*\n +x\[0\] = y\[0\];\n +\^', str(e.value)), e.value


def test_an_excerpt_belongs_to_its_error():
    said = [
        "a.cu(3): error: no instance of overloaded function matches",
        "            argument types are: (int)",
        "    f(1);",
        "    ^",
        "ld: undefined reference to `g'",
        "a.cpp:9:1: error: of a line that is too wide",
        "    9 | " + "x" * 300,
        "      | ^",
        "a.cpp:5:7: error: with no excerpt",
        "b.h:1:1: note: with one",
        "    1 | int y;",
        "      | ^~~~~",
    ]
    variant, target = Variant("ns::f", Cpp("f.cpp"), "f"), Target.parse(H100)
    shown = str(compile_error(variant, target, ["c++"], "\n".join(said[:8]))).split("\n")
    assert [shown[0].rpartition(f"{target.torch}: ")[2] or shown[0], *shown[1:]] == [
        said[0],
        *said[2:6],
    ]
    shown = str(compile_error(variant, target, ["c++"], "\n".join(said[8:])))
    assert shown.endswith(said[8])


def test_a_dtype_that_kernels_do_not_know(call):
    with pytest.raises(
        LaunchError,
        match="T: no kernel knows torch.complex64; dtypes that kernels know are .*float32",
    ):
        call('extern "C" void f(T* x) {}', {"T": torch.complex64})


def test_a_triton_function_that_is_not_there(tmp_path):
    from jitkern.launch.call import declared_in

    (tmp_path / "f.py").write_text("import triton\n@triton.jit\ndef scale(x): pass\n")
    source = Triton("f.py", folder=str(tmp_path))
    with pytest.raises(LaunchError, match="has no @triton.jit function `scael`; it has: scale"):
        declared_in("mistakes::f", source, "scael")


@needs_nvrtc
def test_an_include_directory_is_found_like_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("kernels", "inc", "kernels/beside"):
        (tmp_path / folder).mkdir()
    (tmp_path / "kernels" / "k.cu").write_text(
        '#include "a.h"\n__global__ void k(int* x) { *x = A; }'
    )
    for folder in ("inc", "kernels/beside"):
        (tmp_path / folder / "a.h").write_text("#define A 1")
        root = folder.rpartition("/")[2]
        cuda_kernel("kernels/k.cu", "k", include=[root], target=H100).compile()
    with pytest.raises(DeclarationError, match=f"there is no directory .*{tmp_path}/none"):
        cuda_kernel("kernels/k.cu", "k", include=["none"], target=H100)


def test_a_declared_include_directory_that_is_not_there(call, tmp_path):
    source = Cpp("f.cpp", folder=str(tmp_path), include=["none"])
    (tmp_path / "f.cpp").write_text('extern "C" void f(float* x) {}')
    op = kernel(schema(), cpu=source)
    op.sources["cpu"] = (source,)
    op.launch("cpu")(lambda k, x: k.f(x))
    with pytest.raises(
        DeclarationError, match=rf"include=\['none'\] is not a directory: .*{tmp_path}/none"
    ):
        op(torch.ones(3))


TORCHES = {
    "missing_dependency": ("import no_such_package", "No module named 'no_such_package'"),
    "missing_library": ("raise ImportError('libx.so: not found')", "libx.so: not found"),
    "library_of_ctypes": ("raise OSError('libx.so: not found')", "libx.so: not found"),
}


@pytest.mark.long
@pytest.mark.parametrize("command", ["list", "prewarm", "explain softmax"])
@pytest.mark.parametrize("torch", ["absent", *TORCHES])
def test_a_command_without_an_importable_torch(fresh_python, tmp_path, command, torch):
    text, told = TORCHES.get(torch, ("", "import of torch halted; None in sys.modules"))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(text)
    code = "import sys\n"
    code += f"sys.path.insert(0, {str(tmp_path)!r})\n" if text else "sys.modules['torch'] = None\n"
    code += f"from jitkern.cli import main; sys.exit(main({command.split()}))"
    done = fresh_python(code)
    assert (done.returncode, done.stderr) == (
        1, f"jitkern: this command needs PyTorch, which cannot be imported: {told}: pip install torch\n"
    ), done.stderr  # fmt: skip
