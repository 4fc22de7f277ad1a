"""Programs are bounded in number and in memory, whatever keeps changing between calls."""

import gc
import itertools
import threading
import types
import weakref

import pytest
import torch
from calls_of_ops import misses
from helpers import one_in_four, programs_of, served

from jitkern.declare import Cpp, kernel
from jitkern.runtime import specializer
from jitkern.runtime.records import BACKOFF, TRACES
from jitkern.trace.scope import Scope

TEXT = """extern "C" void put(double* o, double v) { *o = v; }"""
X = torch.ones(2)
STEPS = 120
DEBUG, BATCH, SCALE, HELPER = False, None, 1.0, None
SETTINGS = types.ModuleType("settings")
_number = itertools.count()


def made(schema, launch):
    op = kernel(f"jitkern_test::bounded{next(_number)}{schema}", cpu=Cpp(text=TEXT))
    op.launch("cpu")(launch)
    return op


def put(k, value):
    out = torch.empty(1, dtype=torch.float64)
    k.put(out, value)
    return out


def records_below(folder):
    return [*folder.glob("v1/*/*.call.*")]


def scopes():
    gc.collect()
    return sum(type(one) is Scope for one in gc.get_objects())


def by_object(k, x):
    if DEBUG:
        print(BATCH.sum())
    return put(k, 1.0)


def by_float(k, x):
    return put(k, SCALE)


def by_closure(k, x):
    return put(k, HELPER(1.0))


def by_member(k, x):
    return put(k, SETTINGS.scale)


def rebind_object(step):
    globals()["BATCH"] = torch.ones(1 << 10)


def rebind_float(step):
    globals()["SCALE"] = float("1.0")


def rebind_closure(step):
    by = float("1.0")
    globals()["HELPER"] = lambda v: v * by


def rebind_member(step):
    SETTINGS.scale = float("1.0")


REBINDINGS = {
    "object": (by_object, rebind_object),
    "float": (by_float, rebind_float),
    "closure": (by_closure, rebind_closure),
    "member": (by_member, rebind_member),
}


@pytest.mark.parametrize("what", one_in_four(REBINDINGS))
def test_what_is_rebound_to_an_equal_value_is_bounded(what, cache_dir):
    launch, rebind = REBINDINGS[what]
    rebind(0)
    op = made("(Tensor x) -> Tensor", launch)
    alive = scopes()
    for step in range(STEPS):
        rebind(step)
        assert op(X).item() == 1
    specializer.settle()
    assert scopes() - alive <= TRACES
    assert len(records_below(cache_dir)) <= 1
    assert served(op, X).item() == 1, "a value that stays is served by C again"
    before = misses(op)
    assert op(X).item() == 1 and misses(op) == before


def test_an_object_that_a_program_does_not_use_is_not_kept_alive():
    op = made("(Tensor x) -> Tensor", by_object)
    old = []
    for step in range(8):
        rebind_object(step)
        old.append(weakref.ref(BATCH))
        served(op, X)
    globals()["BATCH"] = None
    gc.collect()
    assert not any(ref() is not None for ref in old)
    assert op(X).item() == 1


CHANGING = {
    "text": ("(Tensor x, str v) -> Tensor", lambda k, x, v: put(k, float(len(v))), "a{}".format),
    "bools": (
        "(Tensor x, bool[] v) -> Tensor",
        lambda k, x, v: put(k, float(sum(v))),
        lambda i: [bool(i >> bit & 1) for bit in range(9)],
    ),
    "length": (
        "(Tensor x, int[] v) -> Tensor",
        lambda k, x, v: put(k, float(len(v))),
        lambda i: [1] * (i % 200),
    ),
    "int": ("(Tensor x, int v) -> Tensor", lambda k, x, v: put(k, float(len(str(v)))), int),
}


@pytest.mark.parametrize("what", one_in_four(CHANGING))
def test_values_that_keep_changing_are_bounded(what, cache_dir):
    schema, launch, value = CHANGING[what]
    op = made(schema, launch)
    for i in range(STEPS):
        assert op(X, value(i)).item() == launch(_Recorder(), X, value(i)).item()
    specializer.settle()
    assert len(records_below(cache_dir)) <= TRACES + 1
    wanted = launch(_Recorder(), X, value(3)).item()
    assert served(op, X, value(3)).item() == wanted
    assert op(X, value(3)).item() == wanted


class _Recorder:
    """A `k` that computes what the kernel computes."""

    @staticmethod
    def put(out, value):
        out.fill_(value)


@pytest.mark.long
def test_each_text_has_its_record(cache_dir, run_python):
    code = """
import torch
from jitkern.declare import Cpp, kernel
from jitkern.runtime import binding, specializer
op = kernel("jitkern_test::named(Tensor x, str name) -> Tensor", cpu=Cpp(text='extern "C" void put(double* o, double v) { *o = v; }'))
@op.launch("cpu")
def _(k, x, name):
    out = torch.empty(1, dtype=torch.float64)
    k.put(out, {"relu": 1.0, "gelu": 2.0}.get(name, float(len(name))))
    return out
for name in ("relu", "gelu", "other", "relu", "some", "more", "names", "gelu"):
    for n in (1, 5):
        print(op(torch.ones(n), name).item(), end=" ")
specializer.settle()
print(binding.runtime().misses(op.programs["cpu"].number) if binding.runtime() else "")
"""
    first = run_python(code)
    assert first.returncode == 0, first.stderr
    second = run_python(code.replace("import torch\n", "import torch, jitkern\n", 1))
    assert second.stdout.split()[:-1] == first.stdout.split()[: len(second.stdout.split()) - 1]
    assert int(second.stdout.split()[-1]) <= 6, "one call of each text asks for its record"


@pytest.mark.long
def test_more_programs_than_places_replace_the_oldest():
    op = made("(Tensor x, int v) -> Tensor", CHANGING["int"][1])
    alive = scopes()
    for i in range(6000):
        assert op(X, i).item() == len(str(i))
    for i in (1, 22, 333):
        assert served(op, X, i).item() == len(str(i))
    assert scopes() - alive <= 2
    assert len(programs_of(op).known) <= 128


@pytest.mark.long
def test_programs_are_replaced_while_threads_run_them():
    """Each thread changes what the launch function reads, and calls; all get a value that was there."""
    op = made("(Tensor x) -> Tensor", by_float)
    stop, wrong = [], []
    values = {1.0, 2.0, 3.0}

    def call():
        while not stop:
            if op(X).item() not in values:
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for step in range(3000):
        globals()["SCALE"] = float(str(1 + step % 3))
        for _ in range(1 << BACKOFF[0] if step % 100 == 0 else 1):
            op(X)
    stop.append(1)
    for thread in threads:
        thread.join()
    assert not wrong
