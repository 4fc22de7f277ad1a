"""Programs: what C makes of the steps of a trace, and of steps that no trace would make."""

import ctypes
import subprocess
from ctypes import c_ulonglong, c_void_p

import pytest
import torch
from calls_of_ops import SCALE, X
from helpers import programs_of, served

from jitkern import testing
from jitkern.launch.runner import Runner
from jitkern.launch.symbols import Facts, Instruction
from jitkern.runtime import binding
from jitkern.runtime.guards import Guard
from jitkern.runtime.programs import LoadedProgram
from jitkern.runtime.symbols import symbols
from jitkern.trace.program import CODES, encoded, parsed_program
from jitkern.trace.trace import trace


def launch(k, x):
    out = torch.empty_like(x)
    k.scale[{"T": x.dtype}](out, x, 2.0, x.numel())
    return out


@pytest.fixture
def op(declare):
    return declare("(Tensor x) -> Tensor", SCALE, launch)


@pytest.fixture
def traced(op):
    """The trace of a call."""
    op(X)
    runner = op.backend("cpu").devices.runner(op.sources["cpu"][0], X.device)
    assert isinstance(runner, Runner)
    return trace(op.signature, launch, [X], frozenset(), X.device, runner)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (2, 0, 3), (2, 3)], ids=str)
def test_a_tensor_of_any_rank_is_served(op, shape):
    x = torch.ones(shape)
    assert torch.equal(served(op, x), 2 * x)


def changed(name, place, value):
    """A program whose first step of this name has another operand."""

    def change(program):
        words, at = list(program.words), 0
        while words[at] != CODES[name]:
            at += 2 + words[at + 1]
        words[at + 2 + place] = value
        return program._replace(words=tuple(words))

    return change


UNSOUND = {
    "a register that is not there yet": changed("PASS", 1, 99),
    "an argument that is none": changed("TENSOR", 0, 7),
    "a dimension beyond the rank": changed("SIZE", 2, 6),
    "a kernel that is not given": changed("CALL", 0, 3),
    "a result twice": changed("RETURN", 0, 1),
    "an argument as a result": changed("RETURN", 1, 0),
    "no end": lambda program: program._replace(words=program.words[:-1]),
    "no result": lambda program: program._replace(words=program.words[:-4]),
    "too few registers": lambda program: program._replace(registers=2),
    "no words": lambda program: program._replace(words=()),
    "no such step": lambda program: program._replace(words=(9999, 0, *program.words)),
}


@pytest.mark.parametrize("how", UNSOUND)
def test_a_program_that_is_not_sound_never_serves(op, traced, how, caplog):
    slot = programs_of(op)
    program = UNSOUND[how](traced.program)
    kernels = [kernel.function for kernel in traced.kernels]
    before, known = slot.misses, {*slot.known}
    slot.append(
        slot.calls_like(launch, None, None, X.device, [X]),
        LoadedProgram(program, kernels, traced.scope),
    )
    assert "not sound" in caplog.text and slot.known == known
    assert torch.equal(op(X), 2 * X) and slot.misses == before


KINDS = "WTtifbIVLnsN"  # of the arguments of the programs below
LISTED = len(KINDS)  # the number of the first tensor of a list
KERNELS = (["*f32", "f32", "i64"], ["@f32:32"], ["f64"], ["f64", "stream"])
BY_A_GPU = "LAUNCH 2 0" + 7 * " #1" + 6 * " #0"
TENSORS = "TENSOR 0 6 2; TENSOR 1 6 2; "
TABLE = "TABULATE 0 #1 0 1 #1 #7 #0 #32 #1 #16 #6"
POINTER = TENSORS + "DATA %1 1; NUMBER %2 3; NUMBER %3 4; "
ENCODE = TENSORS + "DATA %1 1; TENSOR_MAP 16 7 1 0 0 0 %1 #4 #1"
SOUND = {  # programs, and what may not stand in place of a part
    "cpu: PASS 0 #0.5; CALL 2": {"cpu": "cuda", "#0.5": "%0", "PASS 0": "PASS 1", "L 2": "L 3", "CALL 2": "CALL 4", "; C": "; CHANGED; C"},
    f"cuda: PASS 0 #0.5; {BY_A_GPU}": {"cuda": "cpu", "2 0": "2 1", "LAUNCH 2": "LAUNCH 3"},
    "cuda: PASS 0 #0.5; CALL 3": {"cuda": "cpu", "CALL 3": "CALL 2", "L 3": "L 4", "PASS 0 #0.5; ": "", "5; ": "5; PASS 0 #0.5; "},
    f"cuda: {ENCODE}": {"cuda": "cpu", "MAP 16": "MAP 17", "16 7 1": "16 7 6", "0 %1": "0 #0", "1 0 0 0 %1": "6 0 0 0 %1" + 15 * " #1"},
    "cpu: ALLOCATE %1 0 6 #2 #1": {" 6 ": " 128 ", " 0 6": " 0 12", "#1": "#1 #1", "0 6": "1 6"},
    "cpu: ALLOCATE %1 0 6" + 126 * " #1": {"0 6": "0 6 #1 #1"},
    "cpu: TENSOR 2 6 2; SIZE %1 2 1": {"2 6 2": "2 47 2", "2 1": "2 2", "TENSOR 2": "TENSOR 3", "SIZE %1 2": "SIZE %1 0"},
    "cpu: NUMBER %1 3; ADD %2 %1 #1": {" #1": "", " 3": " 4", "R %1 3": "R %1 5", "NUMBER %1 3": "NUMBER %1 6"},
    "cpu: NUMBER %1 4; REAL_ADD %2 %1 #0.5": {" 4": " 3"},
    "cpu: NUMBER %1 5; TRUTH %1 1": {" 5": " 3"},
    "cpu: OPTIONAL %1 6; GIVEN 6 1": {"%1 6": "%1 3", "GIVEN 6": "GIVEN 3"},
    f"cpu: LISTED {LISTED} 7 0; TENSOR {LISTED} 6 1; ZERO {LISTED}": {"7 0": "8 0", " 0": " -1", "7": "9", f"{LISTED} 7": f"{LISTED + 1} 7"},
    "cpu: ITEM %1 9 0; ADD %2 %1 %1; COUNT %3 11; ITEM %4 11 2": {"9 0": "9 -1", "%1 9": "%1 7", "%3 11": "%3 3"},
    "cpu: SPELLS 10 0": {"10": "9", " 0": " 1"},
    f"cpu: {TENSORS}COPY 0 1 0": {"COPY 0 1": "COPY 1 0", "Y 0 1": "Y 0 2", "Y 0": "Y -1", "COPY": "ZERO 0; CONTIGUOUS 0 1; COPY"},
    f"cpu: {TENSORS}VIEW 0 0 #1 #1 #0; VIEW 1 -1 #0; ZERO -2": {"VIEW 0 0": "VIEW 0 1", "#1 #1 #0": "#1 #1", "1 -1": "0 -1"},
    f"cpu: {TENSORS}ALLOCATE %1 0 6; VIEW 1 -1 #0; RETURN 0 -2; RETURN 1 -1": {"1 -1 #": "1 0 #", "0 -2": "0 -1", "RETURN 1 -1": "RETURN 1 1", "RETURN 1": "RETURN 0"},
    "cpu: ALLOCATE %1 0 6; RETURN 0 -1; RETURN_NONE 1": {"0 -1; RETURN_NONE 1": "1 -1; RETURN_NONE 0", "N 0": "N 1", "; RETURN_NONE 1": "", "-1; ": "-1; CHANGED; "},
    f"cpu: {TABLE}; FIELD %1 1; FIELD %2 3": {TABLE: "UNFILLED", "%1 1": "%1 0", "%2 3": "%2 4"},
    f"cpu: COUNT %1 7; {TABLE}": {"#32": "#33", "#16": "#8", "#16 ": "#48 ", "#7": "#9", "#7 ": "%1 ", "#1 #7": "#2 #7", "0 #1 ": "0 #0 ", "E 0": "E 120", " #6": "", "#0 #32 #1 #16 #6": "#0 #32"},
    f"cpu: {POINTER}PASS 0 %1; PASS 1 %3; PASS 0 %2; CALL 0": {"0 %1": "0 %2", "1 %3": "0 %3", "S 0 %2": "S 0 %3", "PASS 1 %3; ": "", "PASS 0 %2; ": "", "0 %2; ": "0 %2; PASS 0 %2; ", "0 %1; P": "0 #1; P", "; CALL 0": ""},
    f"cpu: {POINTER}ADDRESS %4 %1 %2; PASS 0 %4; PASS 1 #1.5; PASS 0 #8; CALL 0": {"%1 %2": "%2 %2", "%4 %1": "%4 #8", "%1 %2; ": "%1 %3; "},
    "cpu: PASS 0 #0; PASS 1 #1.5; PASS 0 #8; CALL 0": {"0 #0": "0 #1"},
    f"cuda: {TABLE}; MEMORY %1 16; PASS 2 %1; {BY_A_GPU.replace('2 0', '1 0')}": {"%1 16": "%1 17", "PASS 2": "PASS 0", TABLE: "UNFILLED"},
    "cuda: ATTRIBUTE %1 16; WORKSPACE %2 %1 1": {"%1 16": "%1 128", " 1 ": " 2 ", "%1 1 ": "%1 -1 "},
}  # fmt: skip


def written(text):
    """The program of these steps: `%1` is a register, `#8` a constant, and results follow."""
    facts, steps = Facts(lambda: 0), text.strip().split("; ")
    if "RETURN" not in text:
        made = sum(step.split()[0] in ("ALLOCATE", "VIEW") for step in steps)
        steps += [f"ALLOCATE %90 {made} 6", f"RETURN 0 {~made}", "RETURN_NONE 1"]

    def operand(word):
        if word[0] == "#":
            return facts.constant(float(word[1:]) if "." in word else int(word[1:]))
        return int(word.removeprefix("%"))

    made = [
        Instruction(step.split()[0], tuple(map(operand, step.split()[1:])), 0) for step in steps
    ]
    return encoded(made, [*facts.constants], ["text"], 128)


@pytest.fixture(scope="module")
def accepts(tmp_path_factory):
    """Whether a launch runtime of its own, with a driver, takes a program for the CPU or a GPU."""
    folder = tmp_path_factory.mktemp("runtime")
    (folder / "runtime.c").write_text(binding.variant().source.text)
    command = ["cc", "-w", "-shared", "-fPIC", "-fno-math-errno", "-o", "runtime.so", "runtime.c"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "runtime.so"))
    addresses = {name: at or 1 for name, at in symbols().addresses.items()}
    table = (c_void_p * len(addresses))(*addresses.values())
    library.jitkern_bind(table, c_ulonglong(ctypes.sizeof(table)))
    alive = []
    for slot in range(2):
        library.jitkern_declare(slot, KINDS.encode(), b"Tt", b"written", b"written", slot, 0)

    def accepts(text, kernels=(1, 2, 3, 4)):
        device, _, steps = text.partition(": ")
        alive.append((c_void_p * len(kernels))(*kernels))
        alive.append(testing.loaded_program(written(steps), KERNELS, alive[-1], Guard()))
        return library.jitkern_append(int(device == "cuda"), ctypes.byref(alive[-1]), -1) >= 0

    return accepts


@pytest.mark.parametrize("text", SOUND)
def test_each_operand_is_of_its_kind(text, accepts):
    assert accepts(text)
    for part, other in SOUND[text].items():
        at = (text + " ").rindex(part)
        forged = (text + " ")[:at] + other + (text + " ")[at + len(part) :]
        assert not accepts(forged), forged


def test_a_kernel_without_code_is_refused(accepts):
    assert not accepts("cpu: PASS 0 #0.5; CALL 2", kernels=(1, 2, 0, 4))


@pytest.mark.parametrize(
    ("n", "m"), [(50, 0), (4, 1), (2**62, 0), (1, 2**62), (-1, 0), (2, -1)], ids=str
)
def test_a_view_beyond_its_tensor_is_left_to_python(declare, n, m):
    def launch(k, x, y, n, m):
        x.narrow(0, m, n).copy_(y.narrow(0, 0, n))
        return torch.empty(0)

    op = declare("(Tensor(a!) x, Tensor y, int n, int m) -> Tensor", SCALE, launch)
    base, y = torch.zeros(100), torch.ones(100)
    x = base[20:24]
    op(x, y, 1, 0)
    runner = op.backend("cpu").devices.runner(op.sources["cpu"][0], x.device)
    traced = trace(op.signature, launch, [x, y, 1, 0], frozenset(), x.device, runner)
    steps = [step for step in traced.steps if step.name not in ("LESS", "EQUAL")]
    program = encoded(steps, traced.program.constants, traced.program.texts, 0)
    slot = programs_of(op)
    loaded = LoadedProgram(program, [], traced.scope)
    assert slot.append(slot.calls_like(launch, None, None, x.device, [x, y, 1, 0]), loaded)
    base.zero_()
    assert torch.equal(served(op, x, y, 3, 1), torch.empty(0))
    assert base.sum() == base[21:24].sum() == 3
    with pytest.raises((IndexError, RuntimeError)):
        op(x, y, n, m)
    assert base.sum() == 3


@pytest.mark.parametrize(
    "content",
    [[], [[1], [], []], [["1"], [], [], 0, 0, 0, 0], [[2**31], [], [], 0, 0, 0, 0], [[1.5], [], [], 0, 0, 0, 0]],
    ids=str,
)  # fmt: skip
def test_what_is_no_program_is_refused(content):
    with pytest.raises((TypeError, ValueError)):
        parsed_program(content)
