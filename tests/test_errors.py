import builtins
import pickle
from types import SimpleNamespace

import pytest

from jitkern import errors
from jitkern.errors import CompileError, JitkernError

_CELL = "/tmp/ipykernel_7/123.py"  # noqa: S108  as Jupyter names one

KINDS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, JitkernError)
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_caught_as_runtime_error(kind):
    assert issubclass(kind, RuntimeError)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_drawn_in_the_tree(kind):
    assert kind.__name__ in errors.__doc__


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_pickles_with_its_data(kind):
    before = kind("what failed", op="ns::op", launched=2)
    after = pickle.loads(pickle.dumps(before))
    assert (type(after), str(after), after.op, after.launched) == (kind, "what failed", "ns::op", 2)


def test_compile_error_has_its_fields_without_being_given_them():
    assert CompileError("x").command == ""


def test_errors_name_a_cell_of_a_notebook(monkeypatch):
    shell = SimpleNamespace(
        compile=SimpleNamespace(format_code_name={_CELL: ("Cell", "In[4]")}.get)
    )
    monkeypatch.setattr(builtins, "get_ipython", lambda: shell, raising=False)
    found = {}
    text = "from jitkern.declare import kernel\ndef launch(k):\n    1 / 0\nkernel('cell::f(')"
    with pytest.raises(errors.DeclarationError, match=r"^Cell In\[4\]:4: "):
        exec(compile(text, _CELL, "exec"), found)  # noqa: S102  as a notebook does
    with pytest.raises(ZeroDivisionError) as raised:
        found["launch"](None)
    assert errors.defined_at(found["launch"]) == "Cell In[4]:2: "
    assert errors.error_site(raised.value, found["launch"]) == "Cell In[4]:3: "
    assert errors.error_line(raised.value).startswith("Cell In[4]:3: ZeroDivisionError")
