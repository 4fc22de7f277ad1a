import pickle

import pytest

from jitkern import errors
from jitkern.errors import CompileError, JitkernError

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
