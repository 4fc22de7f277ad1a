"""What a person sees: help, one redrawn line, failures, near misses, and the screens of the docs."""

import fcntl
import importlib
import itertools
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
import time

import pytest
import torch
from helpers import REPOSITORY, last_json

from jitkern import cli as commands, config
from jitkern.cli.output import Progress
from jitkern.cli.prewarm.report import Failures
from jitkern.errors import NotCached
from jitkern.op.all_ops import all_ops
from jitkern.op.op import OPS
from jitkern.prewarming.tasks import Result, Step

PAGE = (REPOSITORY / "docs" / "command_line.md").read_text()
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
CACHE = [
    "dir", "ls", "show", "verify", "explain", "stats", "prune", "clear", "pack", "unpack", "sign", "keygen",
]  # fmt: skip
REMOTE = ["push", "pull", "ls"]
OWN = [*commands.COMMANDS, *(f"cache {verb}" for verb in CACHE), *(f"remote {verb}" for verb in REMOTE)]  # fmt: skip
numbers = itertools.count()
BROKEN = 'extern "C" void scale(T* out, const T* x, double alpha, long long n) { nonsense; }\n'


def _heed_interrupts():
    """Undo what a shell does for the commands that it starts in the background."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def in_terminal(*arguments, cwd=None, interrupt="", columns=80):
    """Run the command in a terminal of 80 columns; returns (exit code, what it wrote).

    interrupt: a text, upon which Ctrl-C is pressed.
    """
    ours, theirs = pty.openpty()
    size = (24).to_bytes(2, sys.byteorder) + columns.to_bytes(2, sys.byteorder) + bytes(4)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, size)
    process = subprocess.Popen(
        [sys.executable, "-m", "jitkern", *arguments],
        stdin=theirs, stdout=theirs, stderr=theirs, cwd=cwd, start_new_session=True,
        preexec_fn=_heed_interrupts,  # noqa: PLW1509  it sets a handler alone
    )  # fmt: skip
    os.close(theirs)
    written = b""
    while True:
        try:
            more = os.read(ours, 65536)
        except OSError:
            break
        if not more:
            break
        written += more
        if interrupt and interrupt.encode() in written:
            os.killpg(process.pid, signal.SIGINT)
            interrupt = ""
    os.close(ours)
    return process.wait(), written.decode().replace("\r\n", "\n")


def plain(text):
    return re.sub(r"\033\[[\d;]*m", "", text)


def shown(text):
    """What stays on the screen: a line that was redrawn is gone."""
    return "\n".join(line.rpartition("\r\033[K")[2] for line in plain(text).split("\n"))


@pytest.fixture
def package(tmp_path, monkeypatch, cli):
    """The folder of kernels of a package, here, whose `scale` does not compile."""
    name = f"broken{next(numbers)}"  # a process imports a name once
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    importlib.import_module("jitkern.ops")
    before = set(all_ops())
    assert cli("init", name)[0] == 0
    folder = tmp_path / name / "src" / name / "kernels"
    (folder / "scale" / "scale.cpp").write_text(BROKEN)
    yield folder
    for op in OPS.keys() - before:
        del OPS[op]


# Help


@pytest.mark.parametrize("arguments", [(), ("cache",), ("remote",)])
def test_a_bare_command_prints_help(cli, arguments):
    code, out, err = cli(*arguments)
    assert (code, out) == (2, "")
    assert "usage: jitkern" in err and "options of every command" in err


@pytest.mark.parametrize("command", OWN)
def test_help_fits_a_terminal_and_speaks_to_users(cli, command):
    code, out, _ = cli(*command.split(), "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80 and len(out.splitlines()) <= 40
    for flag in ("-v, --verbose", "-q, --quiet", "--color", "--cache-dir"):
        assert flag in out
    for word in ("errors become", "Loads no Torch", "module", "subcommand"):
        assert word not in out.partition("options:")[0].replace("a module of one", "")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("prewram",), "prewarm"),
        (("cache", "lss"), "ls"),
        (("prewarm", "--taget", "x"), "--target"),
        (("cache", "ls", "--sort", "sise"), "size"),
        (("cache", "ls", "rowsum"), "--op rowsum"),
        (("remote", "push", "file:///kernels"), "--to file:///kernels"),
        (("remote", "pull", "file:///kernels"), "--from file:///kernels"),
        (("prewarm", "sotfmax"), "softmax"),
        (("explain", "jitkern::vec_ad"), "jitkern::vec_add"),
        (("check", "vecadd"), "vec_add"),
    ],
)
def test_a_near_miss_is_told_what_was_meant_and_is_usage(cli, arguments, meant):
    code, out, err = cli(*arguments)
    assert (code, out, f"did you mean {meant}?" in err) == (2, "", True), err
    assert err.startswith("jitkern: ") and err.count("\n") == 1


def test_a_near_op_of_another_package_is_named_in_full(cli, monkeypatch):
    softmax = importlib.import_module("jitkern.ops").softmax
    monkeypatch.setitem(OPS, "near_miss::clamp_rows", softmax)
    for command in ("check", "explain"):
        code, _, err = cli(command, "clamp_row")
        assert (code, "did you mean near_miss::clamp_rows?" in err) == (2, True), err


def test_an_argument_of_another_type_is_usage(cli):
    code, out, err = cli("prewarm", "softmax", "--call", "f16[2, 3], -1, abc")
    assert (code, out) == (2, "")
    assert "got `abc` for `float scale`" in err


@pytest.mark.long
def test_a_list_fits_its_terminal_with_own_ops_first():
    code, text = in_terminal("list", columns=80)
    lines = shown(text).splitlines()
    assert code == 0 and len(lines) < 24 and max(map(len, lines)) <= 80
    assert re.search(r"are not shown: add -v$", lines[-1])


def test_color_is_asked_for_and_refused(cli):
    assert "\033[" in cli("doctor", "--color", "always")[1]
    assert "\033[" in cli("--color", "always", "doctor")[1]
    assert "\033[" not in cli("doctor", "--color", "auto")[1]


@pytest.mark.long
def test_a_shell_can_complete(tmp_path):
    pytest.importorskip("argcomplete")
    answer = tmp_path / "answer"
    for line, words in {
        "jitkern pre": {"prewarm"},
        "jitkern cache s": {"show", "sign", "stats"},
    }.items():
        environment = {
            **os.environ, "_ARGCOMPLETE": "1", "COMP_LINE": line, "COMP_POINT": str(len(line)),
            "_ARGCOMPLETE_IFS": "\n", "_ARGCOMPLETE_STDOUT_FILENAME": str(answer),
        }  # fmt: skip
        command = [sys.executable, "-c", "from jitkern.cli import main; main()"]
        subprocess.run(command, env=environment, check=False)
        assert {word.strip() for word in answer.read_text().split("\n")} == words


# Prewarm


@pytest.mark.long
def test_prewarm_prints_one_line_for_each_op_and_target():
    code, text = in_terminal("prewarm", "vec_add", "softmax_backward", "--jobs", "1")
    assert code == 0, text
    redrawn = [plain(part) for part in re.findall(r"\r\033\[K([^\r\n]+)", text)]
    assert len(redrawn) > 5 and max(map(len, redrawn)) < 80
    runtime, *lines = shown(text).splitlines()
    assert runtime.startswith("runtime           cpu  ") and len(lines) == 3
    for name, line in zip(("softmax_backward", "vec_add         "), lines):
        assert re.fullmatch(rf"{name}  cpu  4 kernels, \d+ records  \d+\.\d s compiling", line)
    code, again = in_terminal("prewarm", "vec_add", columns=40)
    assert re.match(r"vec_add  cpu  4 kernels, \d+ records  cached\n0 built", shown(again)), again


@pytest.mark.long
def test_prewarm_is_quiet_in_a_pipe_and_has_rows_when_asked(cli):
    code, out, err = cli("prewarm", "vec_add")
    assert (code, len(out.splitlines()), err) == (0, 3, "")
    code, out, err = cli("prewarm", "vec_add", "--refresh", "-v")
    assert out.startswith("status") and out.count("\nbuilt ") >= 4 and "[1/" in err
    code, out, err = cli("prewarm", "vec_add", "-q")
    assert (code, len(out.splitlines()), err) == (0, 1, "")


@pytest.mark.long
def test_a_failure_begins_with_its_line_and_is_told_once(package):
    code, text = in_terminal("prewarm", package.parent.name, "--keep-going")
    assert code == 1
    name, file = package.parent.name, package / "scale" / "scale.cpp"
    place = f"\033[31m{file}:1:"
    assert text.count(place) == 1 and "nonsense" in text.partition(place)[2]
    lines = shown(text).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith(str(file)))
    assert "^" in lines[first + 2]
    assert any(f"the same error as of {name}::scale f" in line for line in lines)
    assert f"{name}::scale     cpu  4 failed" in shown(text)
    assert f"{name}::add_relu  cpu  4 kernels" in shown(text)


def test_an_error_of_several_calls_is_told_with_their_number(capsys):
    failures = Failures(Progress(quiet=True))
    for variant in ("", "f32", ""):
        result = Result("a::f", variant, "cpu", "failed", reason="a::f is wrong")
        failures.step(Step(1, 3, "", finished=True, result=result))
    failures.rest([])
    assert capsys.readouterr().err.splitlines() == [
        "a::f is wrong",
        "jitkern: the same error as of a::f cpu: f32",
        "jitkern: the same error in 1 more group of calls of a::f cpu",
    ]


def test_an_error_of_several_configurations_is_told_once(capsys):
    failures, error = Failures(Progress(quiet=True)), "/k/f.cpp:1:2: error: no such name"
    failed = Result("a::f", "N1", "cpu", "failed", reason=f"could not compile a::f: {error}")
    failures.step(Step(1, 3, "", finished=True, result=failed))
    left_out = [failed._replace(variant=v, status="skipped", reason=f"{v} is left out: {error}\nlog: {v}")
                for v in ("N2", "N3")]  # fmt: skip
    without_gpu = failed._replace(variant="N4", status="skipped", reason="it needs a GPU")
    failures.rest([failed, *left_out, without_gpu, without_gpu._replace(variant="N5")])
    told = capsys.readouterr().err
    assert told.count(error) == 1 and told.count("skipped: it needs a GPU") == 1
    assert "the same error as of a::f N1 cpu: N2, N3\n" in told and "N5" not in told


@pytest.mark.long
def test_an_interrupted_prewarm_says_so_and_keeps_its_work():
    code, text = in_terminal("prewarm", "vec_add", "--jobs", "1", interrupt="[2/")
    assert (code, "interrupted; what was finished is kept" in text) == (130, True), text
    assert "Traceback" not in text
    code, text = in_terminal("cache", "ls")
    assert code == 0 and "0 entries" not in text


@pytest.mark.long
def test_a_call_can_be_named(cli, compiler, package):
    code, out, err = cli("prewarm", "vec_add", "--call", "i32[3] i32[3]", "--jobs", "1", "--json")
    (kernel, *_) = last_json(out)["results"]
    assert (code, kernel["variant"], len(compiler.compiles)) == (0, "i32", 1), err
    code, out, _ = cli("prewarm", "jitkern", "--call", "vec_add(i64[2, 2], i64[2, 2])", "--json")
    assert (code, last_json(out)["results"][0]["variant"]) == (0, "i64")
    assert cli("prewarm", "jitkern", "--call", "i32[3] i32[3]")[0] == 2


@pytest.mark.long
def test_not_cached_names_a_command_that_builds_the_call(cli, compiler):
    op = OPS["jitkern::vec_add"]
    x = torch.ones(3, 2, dtype=torch.int16)
    with config.using(compile="never"), pytest.raises(NotCached) as e:
        op(x, x)
    command = str(e.value).partition("Prewarm it: jitkern ")[2]
    words = command.partition(" --call ")
    assert words[2] == "'jitkern::vec_add(i16[3, 2], i16[3, 2])'"
    code, out, err = cli(*words[0].split(), "--call", words[2].strip("'"), "--json")
    assert (code, last_json(out)["results"][0]["variant"]) == (0, "i16"), err


# Output that nobody takes


@pytest.mark.long
def test_output_that_cannot_be_written_fails_in_one_line():
    words = [sys.executable, "-m", "jitkern", "list", "softmax"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.endswith("jitkern: the output cannot be written: No space left on device\n")
    assert "Traceback" not in done.stderr


# Check


@pytest.mark.long
def test_check_compares_every_kernel_with_the_reference(cli, package):
    code, out, _ = cli("check", f"{package.parent.name}.kernels.add_relu.kernel", "--json")
    report = last_json(out)
    assert (code, report["ok"]) == (0, True), out
    assert {(c["device"], c["check"]) for c in report["checks"] if c["ok"]} >= {
        ("cpu", "reference"), ("cpu", "opcheck")
    }  # fmt: skip


@pytest.mark.long
def test_check_fails_for_a_kernel_that_is_wrong(cli, package):
    file = package / "add_relu" / "add_relu.cpp"
    text = file.read_text()
    assert " + " in text
    file.write_text(text.replace(" + ", " - "))
    code, out, _ = cli("check", f"{package.parent.name}.kernels.add_relu.kernel")
    assert code == 1
    assert re.search(
        r"FAIL broken\d+::add_relu +cpu  cc        reference\n"
        r"     sample 1, .*: out\[\d+\]: got [-.\de]+, expected [-.\de]+, limit [-.\de]+; "
        r"\d+ wrong of 65536 numbers\n", out,
    ), out  # fmt: skip


CRASHING = """
from jitkern.declare import Cpp, kernel
from jitkern.op.op import OPS

COPY = "for (; n--;) o[n] = x[n];"
BODIES = {"bad": "*(volatile long*)8 = 1;", "ends": "exit(0);", "exits": COPY, "fine": COPY, "last": COPY}
F = "#include <stdlib.h>\\n" 'extern "C" void f(float* o, float* x, long n) { %s }'

for name, body in BODIES.items():
    op = kernel(f"crashing::{name}(Tensor x) -> Tensor", cpu=Cpp(text=F % body))

    @op.launch("cpu")
    def launch(k, x):
        out = x.new_empty(x.shape)
        k.f(out, x.contiguous(), x.numel())
        return out

    op.reference(lambda x: x.clone())
    op.samples(lambda device: [__import__("torch").ones(5, device=device)])
op.samples(lambda device: __import__("os").abort())
OPS["crashing::exits"].launch("cpu")(lambda k, x: __import__("sys").exit(0))
"""


@pytest.mark.skipif(not shutil.which("c++"), reason="needs c++")
@pytest.mark.long
def test_a_kernel_that_crashes_fails_its_check_alone(tmp_path):
    (tmp_path / "crashing.py").write_text(CRASHING)
    words = [sys.executable, "-m", "jitkern", "check", "crashing", "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    rows = {(c["op"], c["check"]): c for c in last_json(done.stdout)["checks"]}
    assert rows["crashing::bad", "reference"]["ok"] is False
    note = rows["crashing::bad", "reference"]["note"]
    assert note.startswith("sample 1, (float32[5]): ") and "SIGSEGV" in note
    assert rows["crashing::bad", "others"]["ok"] is None
    assert rows["crashing::ends", "reference"]["ok"] is False
    assert "with the exit code 0" in rows["crashing::ends", "reference"]["note"]
    assert rows["crashing::exits", "reference"]["ok"] is False
    assert "SystemExit: 0" in rows["crashing::exits", "reference"]["note"]
    assert rows["crashing::fine", "opcheck"]["ok"] is True
    assert "by SIGABRT" in rows["crashing::last", "samples"]["note"]


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_check_ends_by_the_signal_that_ended_an_import(number, tmp_path):
    (tmp_path / "ending.py").write_text(f"import os\nos.kill(os.getpid(), {int(number)})\n")
    words = [sys.executable, "-m", "jitkern", "check", "ending"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == -number, done.stderr


HANGING = """
from pathlib import Path
from jitkern.declare import Cpp, kernel

F = 'extern "C" void f(float* o, long n) { while (n) sleep(n); }'
op = kernel("hanging::op(Tensor x) -> Tensor", cpu=Cpp(text="#include <unistd.h>\\n" + F))

@op.launch("cpu")
def launch(k, x):
    out = x.new_empty(x.shape)
    Path("launched").touch()
    k.f(out, x.numel())
    return out

op.reference(lambda x: x.clone())
op.samples(lambda device: [__import__("torch").ones(5, device=device)])
"""


def checking_what_hangs(tmp_path, *options):
    (tmp_path / "hanging.py").write_text(HANGING)
    words = [sys.executable, "-m", "jitkern", "check", "hanging", *options]
    return subprocess.Popen(
        words, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True, preexec_fn=_heed_interrupts,  # noqa: PLW1509  it sets a handler alone
    )  # fmt: skip


@pytest.mark.skipif(not shutil.which("c++"), reason="needs c++")
@pytest.mark.long
def test_a_check_of_a_kernel_that_hangs_can_be_interrupted(tmp_path):
    with checking_what_hangs(tmp_path) as check:
        while not (tmp_path / "launched").exists():
            assert check.poll() is None, check.communicate()
            time.sleep(0.1)
        os.killpg(check.pid, signal.SIGINT)
        assert "interrupted" in check.communicate()[1]
    assert check.returncode == 130


@pytest.mark.long
def test_a_check_that_takes_too_long_fails(tmp_path):
    with checking_what_hangs(tmp_path, "--timeout", "20") as check:
        out, err = check.communicate()
    assert "FAIL hanging::op      cpu  cc        reference\n     sample 1, " in out, err
    assert "it took more than 20 s" in out
    assert check.returncode == 1


def test_what_fails_at_its_import_is_not_checked(cli, tmp_path, monkeypatch):
    text = """
from jitkern.declare import Cpp, kernel
op = kernel("halfway::op(Tensor x) -> Tensor", cpu=Cpp(text='extern "C" void f(float* x) {}'))
op.launch("gpu")
"""
    (tmp_path / "halfway.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    code, out, err = cli("check", "halfway")
    assert (code, "halfway.py:4" in err) == (1, True), err
    assert out == "0 checks passed, 0 failed, 0 skipped; not imported: halfway\n"


@pytest.mark.long
def test_check_says_what_it_cannot_try(cli):
    code, out, _ = cli("check", "softmax_backward")
    assert code == 0
    skipped = "skip softmax_backward cuda           reference no cuda device here" in out
    assert skipped != torch.cuda.is_available()


# clangd


@pytest.mark.skipif(not shutil.which("c++"), reason="needs c++")
def test_compile_commands_are_written_on_request(cli, package):
    assert not list(package.rglob("compile_commands.json"))
    code, out, _ = cli("explain", package.parent.name, "--compile-commands")
    assert (code, len(out.splitlines())) == (0, 2)
    entries = json.loads((package / "add_relu" / "compile_commands.json").read_text())
    (entry,) = [entry for entry in entries if entry["file"].endswith(".cpp")]
    command = [*entry["arguments"], "-fsyntax-only"]
    assert subprocess.run(command, cwd=entry["directory"], check=False).returncode == 0
    entries = json.loads((package / "scale" / "compile_commands.json").read_text())
    assert {entry["file"].rpartition(".")[2] for entry in entries} == {"cpp", "cu"}


# The page of the documentation


@pytest.mark.parametrize("command", OWN)
def test_a_section_asks_for_the_help_of_every_command(command):
    (section,) = [text for text in SECTIONS if f"\n$ jitkern {command} --help\n" in text]
    assert command.partition(" ")[0] in section.partition("\n")[0]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda text: text.partition("\n")[0])
def test_the_flags_that_a_section_names_exist(cli, section):
    commands = re.findall(r"^\$ jitkern (.*) --help$", section, re.MULTILINE)
    helps = "".join(cli(*words.split(), "--help")[1] for words in ("", *commands))
    prose = re.sub(r"^```.*?^```$", "", section, flags=re.DOTALL | re.MULTILINE)
    for flag in set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", prose)):
        assert flag in helps, flag


def test_the_screens_fit_80_columns():
    for screen in re.findall(r"^```text\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE):
        assert max(map(len, screen.splitlines())) <= 80, screen
