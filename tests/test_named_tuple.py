"""Classes of ours are what those of `typing` are."""

import copy
import pickle
import typing

import pytest
import torch

from jitkern.named_tuple import NamedTuple


class Ours(NamedTuple):
    """A place."""

    x: int
    y: int = 2
    what: dict[str, int] | None = None

    @property
    def sum(self) -> int:
        return self.x + self.y


class Theirs(typing.NamedTuple):
    x: int
    y: int = 2
    what: dict[str, int] | None = None


CALLS = [
    ((1,), {}), ((1, 3, {}), {}), ((), {"x": 1}), ((1,), {"what": {}}), ((), {"what": None, "y": 5, "x": 1}),
    ((), {}), ((1, 2, 3, 4), {}), ((1,), {"x": 1}), ((1,), {"z": 1}), ((1, 2, None), {"what": None}),
]  # fmt: skip


@pytest.mark.parametrize("args, kwargs", CALLS, ids=str)
def test_they_take_the_same_arguments(args, kwargs):
    try:
        expected = Theirs(*args, **kwargs)
    except TypeError:
        with pytest.raises(TypeError, match="Ours takes the fields x, y, what"):
            Ours(*args, **kwargs)
    else:
        made = Ours(*args, **kwargs)
        assert made == expected
        assert hash(made[:2]) == hash(expected[:2])
        assert repr(made) == repr(expected).replace("Theirs", "Ours")
        assert made._asdict() == expected._asdict()
        assert (made.x, made.y, made.what) == tuple(expected)


def test_they_have_the_same_methods():
    made = Ours(1)
    assert made._replace(y=7) == Theirs(1)._replace(y=7)
    assert type(made._replace(y=7)) is type(Ours._make([1, 2, None])) is Ours
    assert Ours._fields == Theirs._fields == Ours.__match_args__
    assert Ours._field_defaults == Theirs._field_defaults
    assert made.sum == 3
    with pytest.raises(TypeError):
        made._replace(z=1)


def test_they_do_not_change():
    made = Ours(1)
    for name in ("x", "new"):
        with pytest.raises(AttributeError):
            setattr(made, name, 2)


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v))]
)
def test_they_are_copied_and_pickled(copied):
    made = Ours(1, what={"a": 1})
    assert copied(made) == made
    assert type(copied(made)) is Ours


@pytest.mark.long
@pytest.mark.parametrize("dynamic", [None, True])
def test_dynamo_reads_their_fields(dynamic):
    def step(given):
        return given.x * given.y + Ours(given.x, 5).y

    made = Ours(torch.ones(2), 3)
    compiled = torch.compile(step, backend="eager", fullgraph=True, dynamic=dynamic)
    assert compiled(made).tolist() == [8, 8]
    assert compiled(made._replace(y=4)).tolist() == [9, 9]
