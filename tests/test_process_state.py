"""What a process holds: listed in docs/architecture.md, and renewed in one way after a fork."""

import ast
import os
import re

import pytest
from architecture import MODULES, ROOT, TREES

MAP = (ROOT / "docs" / "architecture.md").read_text()
MADE_TO_CHANGE = {
    "deque", "Counter", "OrderedDict", "defaultdict", "WeakValueDictionary", "WeakKeyDictionary", "WeakSet", "Lock",
    "RLock", "Condition", "Event", "Semaphore", "local", "ContextVar",
}  # fmt: skip
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
CHANGES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "setdefault", "update",
}  # fmt: skip


def assigned(tree):
    for node in tree.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def changing(tree):
    """The names at the top of a module whose objects change, as far as its text tells."""
    top = dict(assigned(tree))
    of_threads = {
        c.name
        for c in tree.body
        if isinstance(c, ast.ClassDef) and "threading.local" in map(ast.unparse, c.bases)
    }
    for name, value in top.items():
        if isinstance(value, (ast.Dict, ast.List)) and not ast.unparse(value).strip("{}[]"):
            yield name
        if isinstance(value, ast.Call):
            maker = ast.unparse(value.func).rpartition(".")[2]
            if maker in MADE_TO_CHANGE | of_threads or (
                maker in ("set", "dict", "list") and not value.args
            ):
                yield name
    for node in ast.walk(tree):
        changed = None
        if isinstance(node, ast.Global):
            yield from node.names
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in CHANGES
        ):
            changed = node.func.value
        elif isinstance(node, (ast.Subscript, ast.Attribute)) and not isinstance(
            node.ctx, ast.Load
        ):
            changed = node.value
        if isinstance(changed, ast.Name) and changed.id in top:
            yield changed.id


@pytest.mark.long
def test_each_object_of_a_module_that_changes_is_listed():
    table = MAP.partition("## What a process holds")[2].partition("## Words")[0]
    listed = {
        f"{room}.{name}"
        for room, names in re.findall(r"^\| `(\w+)` \| (`[^|]*`) \|", table, re.MULTILINE)
        for name in re.findall(r"`([\w.]+)`", names)
    }
    found = {
        f"{module.removeprefix('jitkern.')}.{name}"
        for module, tree in TREES.items()
        for name in {*changing(tree)} - {"__all__"}
    }
    assert found == listed


def test_there_is_one_way_to_renew_after_a_fork():
    places = {name for name, path in MODULES.items() if "register_at_fork" in path.read_text()}
    assert places == {"jitkern._fork"}
    for name, path in MODULES.items():
        if re.search(r"threading\.(Lock|RLock|Condition)\(\)", path.read_text()):
            assert "\nafter_fork(" in path.read_text() or " after_fork(" in path.read_text(), name


@needs_fork
@pytest.mark.parametrize("make", ["Lock", "RLock", "Condition"])
@pytest.mark.parametrize("own", [False, True])
def test_a_lock_is_free_in_a_child(run_python, make, own):
    if own and make == "Lock":
        pytest.skip("who holds a plain lock is not known: no block of ours forks in one")
    done = run_python(
        "import os, threading\n"
        "from jitkern._fork import after_fork\n"
        f"lock = threading.{make}()\n"
        "after_fork(lock)\n"
        "held, done = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with lock: held.set(); done.wait()\n"
        "thread = threading.Thread(target=hold)\n"
        f"if {own}:\n"
        "    with lock: child = os.fork()\n"
        "else:\n"
        "    thread.start(); held.wait(); child = os.fork()\n"
        "if not child:\n"
        "    os._exit(0 if lock.acquire(timeout=0) else 3)\n"
        "status = os.waitpid(child, 0)[1]\n"
        "done.set()\n"
        "print(os.waitstatus_to_exitcode(status))\n"
    )
    assert done.stdout == "0\n", done.stderr


@pytest.fixture
def forked(run_python, tmp_path):
    """Fork while another thread imports `room.part`: `child`, and then `parent`, as statements."""
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "__init__.py").write_text(
        "from jitkern._lazy import on_first_use\n__getattr__ = on_first_use(__name__)\n"
    )

    def forked(part, child, parent):
        (tmp_path / "room" / "part.py").write_text(part)
        return run_python(
            "import os, signal, sys, threading\n"
            f"sys.path.insert(0, {str(tmp_path)!r})\n"
            "import jitkern, room\n"
            "jitkern._lazy.FORK_WAITS = 250.0\n"
            "sys.began = threading.Event()\n"
            "thread = threading.Thread(target=lambda: room.part)\n"
            "thread.start(); sys.began.wait()\n"
            "if not (child := os.fork()):\n"
            "    signal.alarm(250)\n"
            f"    {child}\n"
            f"status = os.waitpid(child, 0)[1]; thread.join()\n{parent}\n"
        )

    return forked


@needs_fork
def test_a_fork_waits_for_an_import_of_another_thread(forked):
    part = "import sys, time\nsys.began.set()\ntime.sleep(0.5)\nVALUE = 3\n"
    done = forked(part, "os._exit(room.part.VALUE)", "print(os.waitstatus_to_exitcode(status))")
    assert done.stdout == "3\n", done.stderr


@needs_fork
def test_a_fork_takes_the_locks_of_imports_that_it_waited_for(forked):
    done = forked(
        "import sys, time\n"
        "from jitkern._fork import after_fork\n"
        "sys.began.set()\ntime.sleep(0.5)\n"
        "class Lock:\n"
        "    calls = []\n"
        "    def acquire(self): self.calls.append('taken')\n"
        "    def release(self): self.calls.append('freed')\n"
        "    def _at_fork_reinit(self): self.calls.append('renewed')\n"
        "after_fork(held=Lock())\n",
        "print(room.part.Lock.calls, flush=True); os._exit(0)",
        "print(room.part.Lock.calls)",
    )
    assert done.stdout == "['taken', 'renewed']\n['taken', 'freed']\n", done.stderr


REGISTERED_DURING_A_FORK = """
import os
lock, events = None, []

def during():  # after the hooks of `_fork`: those that are registered last run first
    global lock
    if lock is None:
        import threading
        from jitkern._fork import after_fork
        lock = threading.Lock()
        lock.acquire()
        after_fork(lambda: events.append("renewed"), held=lock)

os.register_at_fork(before=during)
if {known}:
    import jitkern._fork
for _ in range(2):
    if not (child := os.fork()):
        os._exit(0 if lock.acquire(timeout=0) and events else 3)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lock.locked(), events)
    if lock.locked():
        lock.release()
"""


@needs_fork
@pytest.mark.parametrize("known", [False, True], ids=["even the first", "a later"])
def test_a_fork_frees_no_lock_that_it_did_not_take(fresh_python, known):
    """A module that another thread imports meanwhile registers its lock, and takes it."""
    done = fresh_python(REGISTERED_DURING_A_FORK.format(known=known))
    assert (done.stdout, done.stderr) == ("0 True []\n0 False []\n", "")


FORKS_MEANWHILE = """
import os, signal, sys, threading
import torch
from jitkern.declare import Cpp, kernel

ops, errors, done = [], [], []
for i in range(4):
    op = kernel(f"forks::f{i}(Tensor x) -> Tensor", cpu=Cpp(text=f'extern "C" void f(float* o) {{ *o = {i}; }}'))
    @op.launch("cpu")
    def _(k, x):
        out = x.new_empty(())
        k.f(out)
        return out
    ops.append(op)

def work(i):
    try:
        if ops[i](torch.ones(())).item() != i:
            errors.append("wrong")
    except BaseException as e:
        errors.append(repr(e))
    done.append(i)

def fork():
    while len(done) < len(ops):
        if not (child := os.fork()):
            signal.alarm(250)
            work(CHILD)
            os._exit(len(errors))
        if os.waitpid(child, 0)[1]:
            errors.append("a child failed")

threads = [threading.Thread(target=work, args=(i,)) for i in range(len(ops))]
threads += [threading.Thread(target=fork) for _ in range(FORKS)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(errors)
"""


@pytest.mark.long
@needs_fork
@pytest.mark.parametrize("forks", [1, 2], ids=["one thread forks", "two threads fork"])
@pytest.mark.parametrize("child", [0, 3])
def test_first_compiles_bear_forks_of_other_threads(run_python, forks, child):
    done = run_python(f"FORKS, CHILD = {forks}, {child}\n{FORKS_MEANWHILE}")
    assert (done.stdout, done.stderr) == ("[]\n", "")
