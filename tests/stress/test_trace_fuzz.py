"""Random launch functions: what their programs answer, against the functions run by Python as they are.

Each is a module of its own, with numbers, a table and helpers that it reads, which are rebound
between calls, as are parts of these helpers. JITKERN_FUZZ is how many functions are tried, and
JITKERN_FUZZ_SEED the number of the first one.
"""

import functools
import importlib
import json
import math
import os
import random
import re
import textwrap
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest
import torch
from helpers import last_json, needs_runtime, programs_of

import jitkern
from jitkern.declare import Cpp, kernel
from jitkern.launch.symbols import Unsupported
from jitkern.op.dispatch import Backend
from jitkern.runtime import specializer
from jitkern.runtime.programs import LoadedProgram, OpPrograms
from jitkern.runtime.records import CallClass
from jitkern.trace.trace import trace

pytestmark = [needs_runtime, pytest.mark.long]
FUNCTIONS = int(os.environ.get("JITKERN_FUZZ", "3000"))
IN_FILES = int(os.environ.get("JITKERN_FUZZ", "20"))  # that several processes call
FIRST = int(os.environ.get("JITKERN_FUZZ_SEED", "0"))
PART = 100  # functions of a process
NEAR, FAR = 12, 3
SCHEMA = "(Tensor x, Tensor y, int n, int m, float a, bool flag) -> (Tensor, Tensor)"
SOURCE = """
extern "C" void ints(long* out, long at, long value) { out[at] = value; }
extern "C" void reals(double* out, long at, double value) { out[at] = value; }
"""
INTEGERS = (-7, -3, -2, -1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 17, 255, 256, 1000)
EDGES = (2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.5, 2.0, 3.25, 1e-300, 1e300, math.inf, -math.inf, math.nan)


class Author:
    """Writes a module with a launch function."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.rank = self.random.choice((1, 2, 3))

    def one(self, *choices):
        return self.random.choice(choices)

    def integer(self, depth):
        a, b = (functools.partial(self.integer, depth - 1) for _ in range(2))
        if depth <= 0:
            return self.leaf()
        return self.one(
            lambda: f"({a()} {self.one('+', '-', '*', '//', '%')} {b()})",
            lambda: f"({a()} {self.one('+', '-', '*')} {b()})",
            lambda: f"({a()} {self.one('&', '|', '^')} {b()})",
            lambda: f"({a()} {self.one('<<', '>>')} {self.one(1, 2, 5)})",
            lambda: f"{self.one('min', 'max')}({a()}, {b()})",
            lambda: f"{self.one('abs', '-', '+', '~')}({a()})",
            lambda: f"({a()} ** {self.one(1, 2, 3)})",
            lambda: f"({a()} if {self.truth(depth - 1)} else {b()})",
            lambda: (
                f"{self.one('math.ceil', 'math.floor', 'math.trunc', 'int')}({self.real(depth - 1)})"
            ),
            lambda: f"divmod({a()}, {b()})[{self.one(0, 1)}]",
            lambda: f"abs({a()}).bit_length()",
            lambda: f"HELP{self.one(0, 1)}({a()}, {b()})",
            lambda: f"dict(TABLE).get({a()}, {b()})",
            lambda: f"sorted([{a()}, {b()}, {self.leaf()}])[{self.one(0, 1, 2)}]",
            lambda: f"int({self.truth(depth - 1)})",
            lambda: f"sum(({a()}, {b()}))",
            lambda: f"{self.one('COUNT', 'HELP0')}({a()})",
            lambda: f"HELP2({a()}, q={b()})",
            lambda: f"(lambda p: p {self.one('+', '-')} {self.leaf()})({a()})",
            lambda: f"sum([p * {self.leaf()} for p in x.shape])",
        )()

    def leaf(self):
        return str(self.one(
            "n", "m", "G0", "G1", "len(x)", "x.numel()", "x.dim()", "math.prod(x.shape[:-1])",
            f"x.shape[{self.random.randrange(-self.rank, self.rank)}]",
            f"x.stride({self.random.randrange(self.rank)})", "y.shape[0]", "y.size(n % y.dim())",
            "(x.data_ptr() % 16)", "dict(TABLE)[1]", "NEAR.G4", self.one(*INTEGERS), self.one(*INTEGERS),
        ))  # fmt: skip

    def real(self, depth):
        if depth <= 0:
            return str(self.one("a", "G2", "float(n)", "float(x.shape[0])", "0.5", "-2.0", "1e3"))
        a, b = (functools.partial(self.real, depth - 1) for _ in range(2))
        return self.one(
            lambda: f"({a()} {self.one('+', '-', '*', '/')} {b()})",
            lambda: f"({self.integer(depth - 1)} / {b()})",
            lambda: f"({a()} ** {self.one(2, 3, 0.5, -1)})",
            lambda: f"(0.9 ** {self.integer(0)})",
            lambda: f"math.sqrt(abs({a()}))",
            lambda: f"({a()} if {self.truth(depth - 1)} else {b()})",
            lambda: f"{self.one('min', 'max')}({a()}, {b()})",
            lambda: f"{self.one('abs', '-')}({a()})",
            lambda: f"float({self.integer(depth - 1)})",
            lambda: f"math.exp(-abs({self.one('G2', '0.25', 'a')}))",
        )()

    def truth(self, depth):
        if depth <= 0:
            return str(self.one(
                "flag", "x.is_contiguous()", "x is y", "x.shape == y.shape", "n in (1, 2, 3)",
                "x.dtype == KIND", "isinstance(n, int)", "type(a) is float", "G3", "math.isnan(a)",
                "math.isinf(a)", "a.is_integer()", "same(x, y)",
                "MODE == 'plain'", "n in SOME", "x.dtype in {torch.float32, torch.float16}",
            ))  # fmt: skip
        sign = self.one("<", "<=", ">", ">=", "==", "!=")
        return self.one(
            lambda: f"({self.integer(depth - 1)} {sign} {self.integer(depth - 1)})",
            lambda: f"({self.real(depth - 1)} {sign} {self.one('a', '0.0', '1', 'n')})",
            lambda: f"(not {self.truth(depth - 1)})",
            lambda: f"({self.truth(depth - 1)} {self.one('and', 'or')} {self.truth(depth - 1)})",
        )()

    def module(self):
        """The text of the module."""
        lines = [f"    i{j} = {self.integer(self.one(1, 2, 3))}" for j in range(self.one(1, 2, 3))]
        lines += [f"    r{j} = {self.real(self.one(1, 2))}" for j in range(self.one(1, 2))]
        if self.random.random() < 0.4:
            lines += [f"    if {self.truth(1)}:", f"        i0 = {self.integer(2)}"]
        if self.random.random() < 0.2:
            lines += [
                "    b = 1",
                f"    while b < min({self.leaf()}, 4096): b *= 2",
                "    i0 = i0 + b",
            ]
        if self.random.random() < 0.2:
            lines += [f"    for s in x.shape: i0 = i0 + s * {self.one(1, 3)}"]
        numbers = [line.split()[0] for line in lines if line.startswith(("    i", "    r"))]
        numbers = [name for name in dict.fromkeys(numbers) if name[1:].isdigit()]
        launches = [
            f"    k.{'ints(out' if name[0] == 'i' else 'reals(real'}, {at}, {name})"
            for at, name in enumerate(numbers)
        ]
        decorator = self.one("", "", "", "@wrapped\n")
        return "\n".join([
            "import math, torch, types",
            f"G0, G1, G2, G3 = {self.one(*INTEGERS)}, {self.one(*INTEGERS)}, {self.one('0.5', '-3.0', '2.0')}, {self.one(True, False)}",
            "KIND = torch.float32",
            f"TABLE = (1, {self.one(*INTEGERS)}), (4, {self.one(*INTEGERS)})",
            f"def HELP0(p, q={self.one(1, 2)}): return p + {self.one('q', 'G0', '2 * q')}",
            f"def HELP1(p, q): return {self.one('HELP0(q, p)', 'p - q', 'max(p, q, G1)')}",
            f"def HELP2(p, *, q=2, r={self.one(1, 3)}): return p + q * r",
            "def counter(c): return lambda p: p + c",
            f"COUNT = counter({self.one(*INTEGERS)})",
            f"NEAR, MODE, SOME = types.ModuleType('near'), 'plain', frozenset(({self.one(*INTEGERS)}, 2))",
            f"NEAR.G4 = {self.one(*INTEGERS)}",
            "def same(p, q): return p is q",
            "def wrapped(f):\n    def inner(k, *rest): return f(k, *rest)\n    return inner",
            f"{decorator}def launch(k, x, y, n, m, a, flag):",
            *lines,
            "    out = torch.zeros(16, dtype=torch.int64)",
            "    real = torch.zeros(16, dtype=torch.float64)",
            *launches,
            "    return out, real",
        ])  # fmt: skip

    def tensor(self, rank):
        sizes = [self.one(0, 1, 1, 2, 3, 4, 7) for _ in range(rank)]
        made = torch.empty(
            [size + self.one(0, 0, 1) for size in sizes],
            dtype=self.one(torch.float32, torch.float32, torch.int64),
        )
        made = made[tuple(slice(0, size) for size in sizes)]
        return made.transpose(0, rank - 1) if self.random.random() < 0.3 else made

    def arguments(self):
        """A call."""
        x = self.tensor(self.rank)
        y = x if self.random.random() < 0.2 else self.tensor(self.one(1, 2))
        n, m = (self.one(*INTEGERS, *(EDGES if self.random.random() < 0.05 else ())) for _ in "nm")
        return [x, y, n, m, self.one(*FLOATS), self.one(True, False)]

    def near(self, args):
        """A call like another one."""
        args = list(args)
        at = self.random.randrange(len(args))
        args[at] = self.arguments()[at]
        if at == 0 and args[0].dim() != self.rank:
            args[0] = self.tensor(self.rank)
        return args

    def rebind(self, module):
        """Change what the launch function reads; returns what undoes that."""
        name = self.one(
            "G0", "G1", "G2", "G3", "TABLE", "HELP0", "KIND", "MODE", "SOME", "abs",
            "HELP0.__code__", "HELP0.__defaults__", "HELP2.__kwdefaults__", "NEAR.G4",
            "COUNT.cell_contents",
        )  # fmt: skip
        number = self.one(*INTEGERS)
        value = {
            "G2": -0.25,
            "G3": not module["G3"],
            "TABLE": (*module["TABLE"], (self.one(1, 4, 9), number)),
            "HELP0": module["HELP1"],
            "KIND": torch.int64,
            "MODE": self.one("plain", "other"),
            "SOME": frozenset((number, 3)),
            "abs": lambda p: -p,
            "HELP0.__code__": (lambda p, q=1: p - q).__code__,
            "HELP0.__defaults__": (number,),
            "HELP2.__kwdefaults__": {"q": 1, "r": number},
        }.get(name, number)
        owner, _, member = name.rpartition(".")
        if not owner:
            before = {**module}
            module[name] = value
            return lambda: (module.clear(), module.update(before))
        changed = module["COUNT"].__closure__[0] if owner == "COUNT" else module[owner]
        before = getattr(changed, member)
        setattr(changed, member, value)
        return functools.partial(setattr, changed, member, before)


class Plain:
    """The `k` of a launch function that Python runs: it writes where the kernels would."""

    def ints(self, out, at, value):
        out[at] = value

    def reals(self, out, at, value):
        out[at] = float(value)


def outcome(function, args):
    try:
        return [repr(made.tolist()) for made in function(*args)]
    except Exception:
        return "raised"


_numbers = iter(range(1 << 30))


@pytest.fixture
def op(tmp_path, monkeypatch):
    (tmp_path / "k.cpp").write_text(SOURCE)
    made = kernel(
        f"jitkern_fuzz::f{next(_numbers)}{SCHEMA}", cpu=Cpp(str(tmp_path / "k.cpp"), strided=True)
    )
    monkeypatch.setattr(CallClass, "is_due", lambda _: False)  # they are made here
    monkeypatch.setattr(OpPrograms, "recall", lambda *_: False)
    return made


def executed(seed, text):
    """The names of a module without a file."""
    module = {"__name__": f"fuzz{seed}"}
    exec(compile(text, f"<fuzz {seed}>", "exec"), module)
    return module


def written(seed, run=executed):
    """An author's module, a call that it answers, and its launch function; None for none found."""
    author = Author(seed)
    text = author.module()
    module = run(seed, text)
    for _ in range(20):
        args = author.arguments()
        if isinstance(by_python(module, args), list):
            return author, text, module, args
    return None


def by_python(module, args):
    return outcome(functools.partial(module["launch"], Plain()), args)


def calls_of(author, args):
    """Calls of a module, of which `args` is one."""
    near = (author.near(args) for _ in range(NEAR))
    return [args, *near, *(author.arguments() for _ in range(FAR))]


def test_a_program_answers_as_the_launch_function_does(op):
    served = refused = 0
    for found in filter(None, map(written, range(FIRST, FIRST + FUNCTIONS))):
        author, text, module, args = found
        op.launch("cpu")(module["launch"])
        op(*args)  # compiles the kernels, once for all
        cpu = torch.device("cpu")
        runner = op.backend("cpu").devices.runner(op.sources["cpu"][0], cpu)
        try:
            traced = trace(op.signature, module["launch"], args, frozenset(), cpu, runner)
        except Unsupported:
            refused += 1
            continue
        served += compared(op, traced, author, text, module, args)
    assert served > FUNCTIONS  # else it is Python that was compared with itself
    assert refused < FUNCTIONS / 4


def compared(op, traced, author, text, module, args):
    """Compare calls, some after something was rebound; how many of them C served."""
    op.launch("cpu")(module["launch"])
    slot = programs_of(op)
    kernels = [kernel.function for kernel in traced.kernels]
    variant = LoadedProgram(traced.program, kernels, traced.scope)
    slot.append(slot.calls_like(module["launch"], None, None, torch.device("cpu"), args), variant)
    calls = calls_of(author, args)
    before, made = slot.misses, 0
    for rebound in (False, True):
        if rebound:
            author.rebind(module)
        for call in calls[: 4 if rebound else None]:
            made += 1
            assert outcome(op, call) == by_python(module, call), (
                f"{text}\ncalled with {call}, rebound: {rebound}"
            )
    return made - (slot.misses - before)


RECORDED = 8  # calls of a function that the first process makes
FEW, EDITS = 3, 2  # calls after each rebinding, and how many of these there are
counted = Counter()  # of this process, see `count`


def count(owner, name):
    """Count the calls of a function."""
    inner = getattr(owner, name)

    def run(*args, **kwargs):
        counted[name] += 1
        return inner(*args, **kwargs)

    setattr(owner, name, run)


def edited(text, seed):
    """The text of a module with another number in it."""
    draw = random.Random(f"edit {seed}")
    head, mark, rest = text.partition("    out = torch.zeros")
    places = [
        match.span()
        for match in re.finditer(r"\b[0-9]+\b", head)
        if not re.search(r"    (b = 1|while)", head[: match.end()].rpartition("\n")[2])  # no end
    ]
    begin, end = draw.choice(places)
    number = draw.choice([n for n in "012357" if n != head[begin:end]])
    return f"{head[:begin]}{number}{head[end:]}{mark}{rest}"


@functools.cache
def op_of_files(number, source):
    """Return one op for several launch functions, which are declared in turn, so that its kernels are compiled once."""
    return kernel(f"jitkern_fuzz::files{number}{SCHEMA}", cpu=Cpp(source, strided=True))


class Process:
    """A process that calls the launch functions of files through ops, and compares the answers.

    stage: first, second or edited. recorded: the calls that C served once the first process had
    made them.
    """

    def __init__(self, folder, stage, recorded):
        self.folder, self.stage, self.recorded = Path(folder), stage, {*recorded}
        self.counts = Counter()
        self.served, self.wrong, self.lost = [], [], []
        count(Backend, "_run_in_python")
        count(specializer, "trace")

    def run(self, seeds):
        """Call the launch functions of these modules."""
        for seed in seeds:
            found = written(seed, self.module)
            if found is None:
                continue
            author, _, module, args = found
            op, calls = op_of_files(seed // 25, str(self.folder / "k.cpp")), calls_of(author, args)
            op.launch("cpu")(module["launch"])
            self.counts.update(functions=1)
            if self.stage == "second":
                with mock.patch.object(CallClass, "is_due", return_value=False):  # no trace
                    self.around(seed, op, module, calls, only=self.recorded)
            self.around(seed, op, module, calls)
        self.counts.update(traces=counted["trace"], compiles=jitkern.stats()["compiles"])
        return {name: vars(self)[name] for name in ("counts", "served", "wrong", "lost")}

    def module(self, seed, text):
        """Import the module of a text, whose file the second process only reads."""
        path = self.folder / f"fuzz{seed}.py"
        if self.stage != "second":
            path.write_text(edited(text, seed) if self.stage == "edited" else text)
        return vars(importlib.import_module(path.stem))

    def around(self, seed, op, module, calls, only=None):
        """Make calls before what the function reads is rebound, then, and once it is as it was.

        only: those that launch records must serve.
        """
        editor, undo = Author(f"rebind {seed}"), []
        first, few = calls if self.stage != "first" else calls[:RECORDED], calls[:FEW]
        for round_ in range(EDITS + 2):
            if 0 < round_ <= EDITS:
                undo.append(editor.rebind(module))
            while undo and round_ > EDITS:
                undo.pop()()
            places = [
                (f"seed {seed}, {round_}, call {i}", c)
                for i, c in enumerate(few if round_ else first)
            ]
            random.Random(f"{self.stage} {seed}").shuffle(places)
            for place, args in places:
                if only is None:
                    self.compare(op, place, module, args)
                elif place in only:
                    by_record = self.compare(op, place, module, args)
                    self.counts.update(recorded=1, by_records=by_record)
                    self.lost += [] if by_record else [place]
                if self.stage == "first":
                    specializer.settle()
                    self.served += [place] * self.compare(op, place, module, args)

    def compare(self, op, place, module, args):
        """Compare a call; returns whether C served it."""
        before = counted["_run_in_python"]
        found, wanted = outcome(op, args), by_python(module, args)
        by_c = counted["_run_in_python"] == before
        self.counts.update(calls=1, by_c=by_c)
        if found != wanted:
            self.wrong.append(f"{self.stage}, {place}: {found}, not {wanted}")
        return by_c


def test_other_processes_answer_as_the_launch_functions_do(fresh_python, tmp_path):
    """A first process keeps launch records; a second finds them; a third has edited modules."""
    total, wrong, lost = Counter(), [], []
    for begin in range(FIRST, FIRST + IN_FILES, PART):
        folder = tmp_path / f"part{begin}"
        folder.mkdir()
        (folder / "k.cpp").write_text(SOURCE)
        seeds, recorded = range(begin, min(begin + PART, FIRST + IN_FILES)), []
        for stage in ("first", "second", "edited"):
            (folder / "recorded.json").write_text(json.dumps(recorded))
            script = f"""
                import json, sys
                sys.path[:0] = {[str(folder), *map(str, Path(__file__).parents[:2])]}
                import test_trace_fuzz
                recorded = json.load(open({str(folder / "recorded.json")!r}))
                process = test_trace_fuzz.Process({str(folder)!r}, {stage!r}, recorded)
                print(json.dumps(process.run({seeds})))
            """
            never = {} if stage == "first" else {"JITKERN_COMPILE": "never"}
            cache = str(folder / "cache")
            done = fresh_python(textwrap.dedent(script), JITKERN_CACHE_DIR=cache, **never)
            assert done.returncode == 0, done.stderr
            told = last_json(done.stdout)
            recorded = recorded or told["served"]
            wrong += told["wrong"]
            lost += told["lost"]
            total.update({f"{stage}: {name}": n for name, n in told["counts"].items()})
    print(dict(total), lost)
    assert not wrong, "\n".join(wrong)
    # Of a class with many records for single numbers, those for the numbers of a call are tried.
    assert len(lost) <= total["second: recorded"] / 50
    assert total["second: compiles"] == total["edited: compiles"] == 0
    assert total["second: by_records"] > 8 * total["second: functions"]
