"""Ops that are declared when they are first asked for."""

import textwrap

import pytest

import jitkern.ops

FIRST = """
import sys, torch, jitkern.ops
assert not [name for name in sys.modules if name.startswith("jitkern.kernels_src.")]
x = torch.randn(4, 5)
"""
KERNEL = """
import jitkern, torch
from jitkern.declare import kernel, Cpp

op = kernel("lazily::{name}(Tensor x) -> Tensor", cpu=Cpp("k.cpp"))

@op.reference
def _(x):
    return x + 2
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "use",
    [
        "torch.ops.jitkern.softmax(x)",
        "jitkern.ops.softmax(x)",
        "torch.ops.jitkern.softmax.default(x)",
        "torch.compile(lambda x: jitkern.ops.softmax(x), fullgraph=True, backend='aot_eager')(x)",
        "torch.compile(lambda x: torch.ops.jitkern.softmax(x), fullgraph=True, backend='eager')(x)",
        "torch.func.vmap(lambda x: jitkern.ops.softmax(x))(x)",
        "torch.func.vjp(lambda x: jitkern.ops.softmax(x), x)[0]",
    ],
)
def test_an_op_is_declared_by_its_first_use(use, run_python):
    done = run_python(FIRST + f"assert torch.allclose({use}, torch.softmax(x, -1), atol=1e-6)")
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    "mode",
    [
        "torch._subclasses.FakeTensorMode()",
        "torch.device('meta')",
        "torch.inference_mode()",
        "torch.utils._python_dispatch._disable_current_modes()",
        "torch.autograd.forward_ad.dual_level()",
    ],
)
def test_the_mode_of_the_first_use_does_not_stay(mode, run_python):
    done = run_python(
        FIRST
        + textwrap.dedent(f"""
        import time
        from jitkern.runtime.binding import runtime
        with {mode}:
            jitkern.ops.softmax
        slot = jitkern.ops.softmax.programs["cpu"]
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            before = slot.misses
            assert torch.allclose(jitkern.ops.softmax(x), torch.softmax(x, -1), atol=1e-6)
            if runtime() and slot.misses == before:
                break
            time.sleep(0.05)
        else:
            raise SystemExit("C serves no call")
        """)
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_ops_are_listed_and_others_are_absent(run_python):
    done = run_python(
        FIRST
        + textwrap.dedent("""
        assert not hasattr(jitkern.ops, "__wrapped__") and not hasattr(torch.ops.jitkern, "__path__")
        assert not [name for name in sys.modules if name.startswith("jitkern.kernels_src.")]
        jitkern.ops.softmax_backward
        assert "jitkern.kernels_src.vec_add.kernel" not in sys.modules
        assert {"softmax", "softmax_backward", "vec_add", "muladd"} <= set(dir(jitkern.ops))
        assert not hasattr(jitkern.ops, "nothing") and not hasattr(torch.ops.jitkern, "nothing")
        from jitkern.ops import muladd
        assert muladd.overload is torch.ops.jitkern.muladd.default
        assert muladd.overload.__module__ == torch.ops.aten.add.default.__module__.replace("aten", "jitkern")
        """)
    )
    assert done.returncode == 0, done.stderr


def test_a_misspelt_op_is_answered_by_one_question():
    with pytest.raises(AttributeError, match=r"`softmaxx`; did you mean softmax\?$") as raised:
        jitkern.ops.softmaxx  # noqa: B018
    assert raised.value.obj is None  # with an object, Python adds a question to the traceback


@pytest.fixture
def package(tmp_path):
    """A package `lazily` with an op in a folder of its name, and one elsewhere."""
    root = tmp_path / "lazily"
    for folder, name in (("plus", "plus"), ("others", "strange")):
        (root / "kernels" / folder).mkdir(parents=True)
        (root / "kernels" / folder / "kernel.py").write_text(KERNEL.format(name=name))
    (root / "kernels" / "__init__.py").touch()
    (root / "__init__.py").write_text(
        "from jitkern.declare import attach\n"
        "__getattr__, __dir__ = attach(__name__, 'lazily.kernels', namespace='lazily')\n"
    )
    return root


USE = "import sys, torch, jitkern, lazily; x = torch.ones(3)\n"


@pytest.mark.long
def test_a_package_may_attach_its_ops(package, run_python):
    done = run_python(
        USE + "assert lazily.plus.run_reference(x).equal(x + 2)\n"
        "assert 'lazily.kernels.others.kernel' not in sys.modules\n"
        "assert torch.ops.lazily.strange.default is lazily.strange.overload\n"
        "assert {'plus', 'strange'} == set(dir(lazily))"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_prewarm_builds_for_attached_ops(package, run_python):
    done = run_python(USE + "print({result.op for result in jitkern.prewarm()})")
    assert eval(done.stdout) == {"lazily::plus", "lazily::strange"}, done.stderr


def test_an_error_of_the_module_is_raised(package, run_python):
    (package / "kernels" / "broken").mkdir()
    (package / "kernels" / "broken" / "kernel.py").write_text("from math import no_such_name")
    done = run_python(USE + "lazily.plus\nlazily.broken")
    assert "cannot import name 'no_such_name' from 'math'" in done.stderr
