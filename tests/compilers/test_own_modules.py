"""A kernel's own modules are made from their texts: no package is imported to compile a kernel."""

import pytest
from helpers import H100, needs_triton

from jitkern import jit
from jitkern.errors import CompileError
from jitkern.source.kinds import Triton, Variant
from jitkern.target import Target

pytestmark = needs_triton
HEAD = "import triton\nimport triton.language as tl\n"
KERNEL = "@triton.jit\ndef k(out, B: tl.constexpr):\n    tl.store(out + tl.arange(0, B), VALUE)\n"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Write a package of these files, and return what compiles its kernel."""
    monkeypatch.syspath_prepend(tmp_path)

    def compiled(files, folder="own_package", refresh=True):
        for name, text in files.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        name = folder.replace("/", ".")
        source = Triton("k.py", folder=str(tmp_path / folder), package=name)
        variant = Variant("test::own", source, "k", (("B", 64),), ("*f32:16",))
        entry = jit.ensure(variant, Target.parse(H100), refresh=refresh)
        return {name: text for _, name, text in entry.manifest.meta["globals"]}

    return compiled


RAN = "import pathlib\npathlib.Path({!r}).touch()\n"


@pytest.mark.parametrize(
    "text",
    ["raise RuntimeError('no')", "import no_such_module_anywhere", "from .k import *\n1 / 0"],
)
@pytest.mark.long
def test_an_init_that_no_kernel_needs_is_not_run(package, tmp_path, text):
    ran = tmp_path / "ran"
    init = f"{RAN.format(str(ran))}import away_from_here\n{text}\n"
    (tmp_path / "away_from_here.py").write_text(RAN.format(str(ran)))
    files = {"__init__.py": init, "k.py": f"{HEAD}from .own import VALUE\n{KERNEL}"}
    files["own.py"] = f"{HEAD}import away_from_here\nVALUE = tl.constexpr(2.0)\n"
    assert package(files)["VALUE"] == "2.0"
    assert not ran.exists()


@pytest.mark.parametrize(
    "statement",
    [
        "from . import VALUE", "from own_package import VALUE", "from . import other\nVALUE = other.VALUE",
        *(pytest.param(text, marks=pytest.mark.long) for text in (
            "import own_package\nVALUE = own_package.VALUE", "from .other import *",
            "from own_package import other as o\nVALUE = o.VALUE", "from .deeper.most import VALUE",
            "from .deeper import most\nVALUE = most.VALUE",
            "import own_package.deeper.most\nVALUE = own_package.deeper.most.VALUE",
        )),
    ],
)  # fmt: skip
def test_a_name_comes_from_where_an_import_finds_it(package, statement):
    value = f"{HEAD}VALUE = tl.constexpr(3.0)\n"
    files = {"__init__.py": value, "other.py": value, "deeper/most.py": value}
    assert package({**files, "k.py": f"{HEAD}{statement}\n{KERNEL}"})["VALUE"] == "3.0"


def test_an_edit_of_an_init_that_the_kernel_needs_is_compiled(package):
    text = f"{HEAD}from . import VALUE\n{KERNEL}"
    found = [
        package(
            {"__init__.py": f"{HEAD}VALUE = tl.constexpr({n}.0)\n", "k.py": text}, refresh=False
        )
        for n in (2, 3)
    ]
    assert [values["VALUE"] for values in found] == ["2.0", "3.0"]


def test_a_helper_function_of_a_sibling_is_compiled_in(package):
    helper = f"{HEAD}from .sizes import SIZE\n@triton.jit\ndef helper(x):\n    return x * SIZE\n"
    files = {"helpers.py": helper, "sizes.py": f"{HEAD}SIZE = tl.constexpr(7)\n"}
    kernel = KERNEL.replace("VALUE", "helper(2.0)")
    for statement, text in {
        "from .helpers import helper": kernel,
        "from . import helpers": kernel.replace("helper(", "helpers.helper("),
        "from own_namespace.helpers import helper": kernel,
    }.items():
        values = package({**files, "k.py": f"{HEAD}{statement}\n{text}"}, "own_namespace")
        assert values["SIZE"] == "7"


def test_a_class_over_torch_beside_a_kernel_is_not_made(package):
    text = (
        f"{HEAD}import torch\nfrom torch.autograd import Function\nVALUE = tl.constexpr(2.0)\n"
        "class F(Function):\n    def forward(ctx, x): VALUE.value = x\n"
    )
    assert package({"k.py": text + KERNEL})["VALUE"] == "2.0"


@pytest.mark.long
def test_a_value_of_torch_may_choose_a_constant(package):
    text = f"{HEAD}import torch\nVALUE = tl.constexpr(torch.iinfo(torch.int8).max)\n"
    assert package({"k.py": text + KERNEL})["VALUE"] == "127"


@pytest.mark.parametrize(
    "statement",
    [
        "VALUE = tl.constexpr(2 if elsewhere.V is None else 3)",
        "from elsewhere import V\nVALUE = tl.constexpr(2 if V is None else 3)",
        "from elsewhere import V\nVALUE = tl.constexpr(2 if isinstance(V, int) else 3)",
        "try:\n    VALUE = elsewhere.V\nexcept:\n    VALUE = tl.constexpr(2)",
        "try:\n    VALUE = elsewhere.V\nexcept BaseException:\n    VALUE = tl.constexpr(2)",
    ],
)
@pytest.mark.long
def test_no_statement_hides_that_a_value_is_unknown(package, tmp_path, statement):
    (tmp_path / "elsewhere.py").write_text("V = 2\n")
    with pytest.raises(CompileError, match=r"comes from .*elsewhere\.py, which the cache key does"):
        package({"k.py": f"{HEAD}import elsewhere\n{statement}\n{KERNEL}"})


def test_a_function_of_tritons_may_be_chosen_by_any_module(package, tmp_path):
    (tmp_path / "chooses.py").write_text("def fast(): return True\n")
    chosen = (
        "def asked():\n    from chooses import fast\n    return fast()\n"
        "if asked():\n    from triton.language.extra.cuda.libdevice import tanh\n"
        "else:\n    tanh = None\nVALUE = tl.constexpr(2.0)\n"
    )
    values = package({"k.py": f"{HEAD}{chosen}{KERNEL.replace('VALUE', 'tanh(VALUE + 0.0)')}"})
    assert values["VALUE"] == "2.0"


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.long
def test_what_jit_is_told_of_launches_alone_is_not_needed(package, tmp_path, called):
    (tmp_path / "elsewhere.py").write_text("V = ['x']\n")
    jit = "@triton.jit(do_not_specialize=V or [], do_not_specialize_on_alignment=V, debug=True)\n"
    kernel = KERNEL.replace("@triton.jit\n", f"@triton.heuristics({{'B': V.get}})\n{jit}")
    if called:
        kernel = KERNEL.replace("VALUE", "twice(B)")
        kernel = f"{jit}def twice(x):\n    return 2 * x * VALUE\n{kernel}"
    text = f"{HEAD}from elsewhere import V\nVALUE = tl.constexpr(2.0)\n{kernel}"
    assert package({"k.py": text})["VALUE"] == "2.0"


@pytest.mark.parametrize(
    ("text", "decorator"),
    [
        ("", "triton.jit(do_not_specialize=V, debug=V)"),
        ("", "triton.jit(**{'do_not_specialize': V})"),
        ("def jit(do_not_specialize): return triton.jit(debug=bool(do_not_specialize))", "jit(do_not_specialize=V)"),
        ("def names():\n    global VALUE\n    VALUE = tl.constexpr(len(V))", "triton.jit(do_not_specialize=names())"),
        ("D = []", "triton.jit(repr=lambda _, n=D.append(1): f'k{len(D)}', do_not_specialize=V)"),
    ],
)  # fmt: skip
@pytest.mark.long
def test_what_else_a_decorator_says_must_be_known(package, tmp_path, text, decorator):
    (tmp_path / "elsewhere.py").write_text("V = []\n")
    text = f"{HEAD}from elsewhere import V\nVALUE = tl.constexpr(2.0)\n{text}\n"
    with pytest.raises(CompileError, match="the cache key does not cover"):
        package({"k.py": text + KERNEL.replace("triton.jit", decorator)})
