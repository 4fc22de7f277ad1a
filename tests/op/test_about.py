"""What `help`, `inspect` and IPython show of an op."""

import copy
import inspect
import pickle
import pydoc
from typing import Any

import pytest
import torch

import jitkern.ops
from jitkern.declare import Cpp, Op, kernel


def test_the_signature_is_that_of_the_schema():
    op = kernel(
        "jitkern_about::many(Tensor x, Tensor? y, SymInt[2] n=1, *, float a=2.5, bool b=False, "
        "ScalarType? dtype=None, Tensor[] rest, Stream? s=None) -> (Tensor, Tensor)"
    )
    found = inspect.signature(op)
    by_name, none = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
    assert [(p.name, p.annotation, p.default) for p in found.parameters.values()] == [
        ("x", torch.Tensor, none), ("y", torch.Tensor | None, none), ("n", list[int], [1, 1]),
        ("a", float, 2.5), ("b", bool, False), ("dtype", torch.dtype | None, None),
        ("rest", list[torch.Tensor], none), ("s", Any | None, None),
    ]  # fmt: skip
    named = [p.name for p in found.parameters.values() if p.kind == by_name]
    assert named == ["a", "b", "dtype", "rest", "s"]
    assert found.return_annotation == tuple[torch.Tensor, torch.Tensor]
    assert inspect.signature(op).bind(1, 2, rest=[]).arguments["y"] == 2
    with pytest.raises(TypeError, match="'rest'"):
        inspect.signature(op).bind(1, 2)
    nothing = kernel("jitkern_about::nothing(Tensor(a!) x) -> ()")
    assert inspect.signature(nothing).return_annotation is None


def test_the_doc_is_its_authors_words_and_facts():
    op = kernel("jitkern_about::told(Tensor x) -> Tensor", cpu=Cpp("told.cpp"))
    facts = "schema: jitkern_about::told(Tensor x) -> Tensor\ncpu: Cpp"
    head = "told(x: torch.Tensor) -> torch.Tensor"
    assert op.__doc__ == f"{head}\n\n{__doc__}\n\n{facts}"

    @op.reference
    def _(x):
        """x, told."""
        return x

    op.backward(lambda grad: grad)
    assert op.__doc__ == f"{head}\n\nx, told.\n\n{facts}\ndifferentiable"
    scope = {"__name__": "no.such.module", "kernel": kernel, "source": Cpp("told.cpp")}
    exec('op = kernel("jitkern_about::bare(Tensor x) -> Tensor", cpu=source)', scope)
    assert scope["op"].__doc__ == f"{head}\n\n{facts}".replace("told(", "bare(")


def test_help_and_ipython_show_it():
    op = jitkern.ops.softmax
    text = pydoc.render_doc(op, renderer=pydoc.plaintext)
    assert "in module jitkern.kernels_src.softmax.kernel" in text
    assert "softmax(x: torch.Tensor, dim: int = -1, scale: float = 1.0) -> torch.Tensor" in text
    assert "softmax of scale * x along a dimension" in text
    oinspect = pytest.importorskip("IPython.core.oinspect")
    assert oinspect.getdoc(op) == inspect.getdoc(op) == op.__doc__


def test_an_op_has_the_names_of_a_function_and_is_none():
    op: Any = jitkern.ops.vec_add
    assert (op.__name__, op.__qualname__) == ("vec_add", "vec_add")
    assert op.__module__ == op.module == "jitkern.kernels_src.vec_add.kernel"
    assert inspect.unwrap(op) is op and not hasattr(op, "__wrapped__")
    assert copy.deepcopy(op) is pickle.loads(pickle.dumps(op)) is op


def test_the_class_keeps_its_own():
    assert Op.__doc__.startswith("An op: a PyTorch reference")
    assert list(inspect.signature(Op).parameters) == ["signature", "declaration"]
    assert "Calling it calls the registered op" in pydoc.render_doc(Op, renderer=pydoc.plaintext)
