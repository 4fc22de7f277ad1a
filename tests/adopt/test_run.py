"""`jitkern run`, as a user types it: the caches of other JITs are laid, kept, carried and refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from helpers import REPOSITORY

from jitkern import cache_tools
from jitkern.adopt import events, folders
from jitkern.adopt.run import Run
from jitkern.cache.key import Key, digest_of
from jitkern.cache.manifest import NAME, Manifest
from jitkern.cache.store import Cache

# A JIT as FlashInfer and tvm-ffi are: a folder for each source, in which ninja builds a library.
PROGRAM = """
import ctypes, fcntl, hashlib, os, pathlib, subprocess, sys
source = pathlib.Path(__file__).with_name("answer.c").read_text()
folder = pathlib.Path(os.environ["TVM_FFI_CACHE_DIR"], "answer_" + hashlib.sha256(source.encode()).hexdigest()[:8])
folder.mkdir(parents=True, exist_ok=True)
locked = open(folder / "lock", "w")
fcntl.flock(locked, fcntl.LOCK_EX)
if not (folder / "main.c").exists():
    (folder / "main.c").write_text(source)
if not (folder / "build.ninja").exists():
    (folder / "build.ninja").write_text(f'''
rule compile
  depfile = $out.d
  deps = gcc
  command = cc -MMD -MF $out.d -I{pathlib.Path(__file__).parent} -shared -fPIC -o $out $in
build answer.so: compile {folder}/main.c
default answer.so
''')
subprocess.run(["ninja", "-v"], cwd=folder, check=True, stdout=sys.stderr)
print(ctypes.CDLL(str(folder / "answer.so")).answer())
"""


@pytest.fixture
def folder(tmp_path):
    """A program with a JIT, and the sources that it compiles."""
    folder = tmp_path / "app"
    folder.mkdir()
    (folder / "app.py").write_text(PROGRAM)
    (folder / "answer.h").write_text("#define ANSWER 42\n")
    (folder / "answer.c").write_text('#include "answer.h"\nint answer(void) { return ANSWER; }\n')
    return folder


@pytest.fixture
def run(folder, cache_dir):
    """Run a command under `jitkern run`; returns what `subprocess.run` does."""

    def run(*options, command=(sys.executable, "app.py"), cwd=folder, **variables):
        words = [sys.executable, "-m", "jitkern", "run", *options, "--", *map(str, command)]
        environment = {**os.environ, **variables}
        return subprocess.run(
            words,
            check=False,
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def cupy_of(this):
    """The folder, made, of a JIT whose files are whole by themselves."""
    [folder] = [folder for folder in this.folders if folder.jit.name == "cupy"]
    folder.path.mkdir(parents=True)
    return folder


def carry(cache_dir, to, tmp_path):
    bundle = tmp_path / "all.tar"
    for variables, words in (
        ({"JITKERN_CACHE_DIR": str(cache_dir)}, ("pack", "-o", str(bundle))),
        ({"JITKERN_CACHE_DIR": str(to)}, ("unpack", str(bundle))),
    ):
        subprocess.run(
            [sys.executable, "-m", "jitkern", "cache", *words],
            env={**os.environ, **variables}, check=True, capture_output=True,
        )  # fmt: skip
        assert bundle.exists()


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("exit 0", 0),
        ("exit 7", 7),
        ("kill -TERM $$", -signal.SIGTERM),
        ("kill -KILL $$", -signal.SIGKILL),
        ("kill -PIPE $$", -signal.SIGPIPE),  # Python ignores it, and so would its children
    ],
)
def test_the_command_ends_as_it_would_alone(run, script, code):
    assert run(command=("sh", "-c", script)).returncode == code


def test_streams_and_arguments_are_the_commands(folder, cache_dir):
    words = [
        sys.executable,
        "-m",
        "jitkern",
        "run",
        "--",
        "sh",
        "-c",
        'cat; echo "$2" >&2',
        "x",
        "a b",
        "*",
    ]
    done = subprocess.run(words, check=False, input="in", capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == (
        "in",
        "*\njitkern: compiled: nothing\n",
        0,
    )
    words.insert(words.index("run") + 1, "--quiet")
    done = subprocess.run(words, check=False, input="in", capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("in", "*\n", 0)


def test_no_command_and_an_unknown_one_are_told(run):
    assert run(command=("no-such-program",)).returncode == 127
    assert "no-such-program" in run(command=("no-such-program",)).stderr
    assert run(command=()).returncode == 2
    done = run(command=("/etc/passwd",))
    assert (done.returncode, "may not be executed" in done.stderr) == (126, True)


def test_a_report_that_cannot_be_written_starts_nothing(run, folder):
    for place in ("missing/report.json", "."):
        done = run("--report", place, command=("touch", "started"))
        assert done.returncode == 2, done.stderr
        assert f"{place} cannot be written: name a file in a writable directory" in done.stderr
    assert not (folder / "started").exists()


def test_a_url_that_cannot_be_pushed_to_starts_nothing(run, folder):
    for url in ("nowhere", "https://example.invalid"):
        assert run("--push", url, command=("touch", "started")).returncode == 2
    assert not (folder / "started").exists()


@pytest.mark.long
def test_a_script_without_a_first_line_is_run_by_a_shell(run, folder):
    (folder / "plain").write_text("exit 4\n")
    (folder / "plain").chmod(0o755)
    assert run(command=("./plain",)).returncode == 4


def test_nobody_may_read_what_a_run_tells(run):
    for _ in range(2):  # the second one by a note
        for options, redirection in (((), "2>&-"), ((), "2>/dev/full"), (("-q",), "2>&-")):
            words = (sys.executable, "-m", "jitkern", "run", *options, "--", "sh", "-c", "'exit 3'")
            told = subprocess.run(" ".join((*words, redirection)), shell=True, check=False)
            assert told.returncode == 3


@pytest.mark.parametrize("variable", ["TMPDIR", "JITKERN_CACHE_DIR"])
def test_a_place_that_takes_nothing_costs_no_run(run, variable):
    done = run(command=("sh", "-c", "exit 3"), **{variable: "/proc"})
    assert done.returncode == 3 and "Traceback" not in done.stderr


def test_a_variable_of_the_user_wins(run, tmp_path):
    show = ("sh", "-c", "echo $TVM_FFI_CACHE_DIR $TRITON_CACHE_DIR")
    own, ours = run(command=show, TVM_FFI_CACHE_DIR="/own").stdout.split()
    assert own == "/own"
    assert ours.startswith(str(tmp_path))


def test_a_build_is_served_elsewhere_without_a_compiler(
    run, cache_dir, folder, elsewhere, tmp_path
):
    cold = run()
    assert cold.stdout == "42\n"
    assert "cc 1 (" in cold.stderr
    assert "compiled: nothing" in run().stderr
    carry(cache_dir, elsewhere["JITKERN_CACHE_DIR"], tmp_path)
    moved = folder.rename(folder.with_name("moved"))
    done = run("--frozen", cwd=moved, **elsewhere)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "42\n"
    assert "was started" not in done.stderr
    assert "builds served: 1" in done.stderr


@pytest.mark.parametrize("edited", ["answer.h", pytest.param("answer.c", marks=pytest.mark.long)])
def test_an_edited_file_is_compiled_again_or_refused(run, cache_dir, folder, edited):
    run()
    (folder / edited).write_text(
        (folder / edited).read_text().replace("42", "43").replace("ANSWER;", "43;")
    )
    refused = run("--frozen", "--report", "report.json")
    assert refused.returncode != 0
    assert "43" not in refused.stdout
    assert "jitkern run --frozen: ninja compiles" in refused.stderr
    assert f"{folder / edited} differs" in refused.stderr or edited == "answer.c"  # of a new name
    assert "Prepare it where compilers may run, with `jitkern run -- " in refused.stderr
    assert json.loads((folder / "report.json").read_text())["refused"][0]["tool"] == "ninja"
    assert run().stdout == "43\n"
    assert "compiled: nothing" in run("--frozen").stderr


@pytest.mark.long
def test_a_header_that_would_be_found_first_is_not_overlooked(run, folder):
    text = folder / "app.py"
    (folder / "first").mkdir()
    text.write_text(
        text.read_text().replace("-I{path", "-I{pathlib.Path(__file__).parent}/first -I{path")
    )
    assert run().stdout == "42\n"
    (folder / "first" / "answer.h").write_text("#define ANSWER 44\n")
    assert run("--frozen").returncode != 0
    assert run().stdout == "44\n"


def test_a_header_beside_the_source_is_found_first(run, folder, cache_dir):
    assert run().stdout == "42\n"
    [source] = cache_dir.glob("v1/run/*/tvm_ffi-*/*/main.c")
    (source.parent / "answer.h").write_text("#define ANSWER 44\n")
    assert "answer.h is new" in run("--frozen").stderr
    assert [run().stdout, run("--frozen").stdout] == ["44\n", "44\n"]


def test_an_edit_that_keeps_size_and_time_is_built(run, folder):
    header = folder / "answer.h"
    status = header.stat()
    run()
    header.write_text("#define ANSWER 43\n")
    os.utime(header, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert f"{header} differs" in run("--frozen").stderr
    assert run().stdout == "43\n"
    assert run("--frozen").stdout == "43\n"


@pytest.mark.long
def test_folders_of_headers_in_variables_count(run, folder):
    (folder / "answer.c").write_text("#include <far.h>\nint answer(void) { return FAR; }\n")
    for number in (1, 2, 3):
        (folder / str(number)).mkdir()
    (folder / "2" / "far.h").write_text("#define FAR 2\n")
    (folder / "3" / "far.h").write_text("#define FAR 3\n")
    both = f"{folder}/1:{folder}/2"
    assert run(CPATH=both).stdout == "2\n"
    assert run("--frozen", CPATH=both).stdout == "2\n"
    (folder / "1" / "far.h").write_text("#define FAR 1\n")
    assert run("--frozen", CPATH=both).returncode != 0
    assert run(CPATH=both).stdout == "1\n"
    assert run(CPATH=f"{folder}/3").stdout == "3\n"
    assert run(CPATH="").returncode != 0


@pytest.mark.long
def test_a_damaged_library_is_built_or_laid_again(run, cache_dir):
    run()
    [library] = cache_dir.glob("v1/run/*/tvm_ffi-*/*/answer.so")
    library.write_bytes(b"?")
    refused = run("--frozen").stderr
    assert "answer.so differs" in refused
    assert f"{library.parent}: {folders.DELETED}" in refused
    assert run("--frozen").stdout == "42\n"
    library.write_bytes(b"?")
    assert run().stdout == "42\n"


def test_what_was_deleted_is_laid_again(run, cache_dir):
    assert [run().stdout, run().stdout] == ["42\n", "42\n"]  # the second leaves a note
    [library] = cache_dir.glob("v1/run/*/tvm_ffi-*/*/answer.so")
    library.unlink()
    assert run("--frozen").stdout == "42\n"
    for folder in (library.parent, library.parents[1], cache_dir / "v1" / "run"):
        shutil.rmtree(folder)
        assert run("--frozen").stdout == "42\n"


def test_a_file_that_this_run_has_not_written_is_not_kept(cache_dir):
    told = []
    this = Run(["true"], tell=told.append)
    file = cupy_of(this).path / "a"
    file.write_bytes(b"1")
    this.keep()
    file.write_bytes(b"damaged")
    later = file.stat().st_ctime_ns + 1
    this.keep(1.0, later)  # while the command runs
    assert not told and file.exists()
    this.keep(began=later)
    assert told == [f"{file}: {folders.DIFFERS}"] and file.exists()
    this.keep(began=later, lost=later)
    assert told[1:] == [f"{file}: {folders.DELETED}"] and not file.exists()
    this.lay()
    assert file.read_bytes() == b"1"
    file.write_bytes(b"2")
    this.keep(began=file.stat().st_ctime_ns)
    assert len([*cache_dir.glob("v1/*/run.cupy*")]) == 2
    file.write_bytes(b"1")  # of an earlier entry
    later = file.stat().st_ctime_ns + 1
    this.keep(began=later, lost=later)
    assert file.exists() and not told[2:]


def test_a_cache_that_is_deleted_meanwhile_costs_no_run(cache_dir):
    script = f"""
from jitkern.adopt import run
run.EVERY = 0.05
print(run.Run(["sh", "-c", "rm -rf {cache_dir}; sleep 0.5; exit 3"]).execute().code)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.stdout, "Traceback" in done.stderr) == ("3\n", False), done.stderr


def test_what_another_run_goes_on_with_is_not_deleted(run, cache_dir, tmp_path):
    write = "mkdir -p $CUPY_CACHE_DIR; echo {} > $CUPY_CACHE_DIR/x; {}"
    run(command=("sh", "-c", write.format(1, "true")))
    words = [sys.executable, "-m", "jitkern", "run", "--", "sh", "-c"]
    other = subprocess.Popen(
        [*words, write.format(2, "echo; cat")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    other.stdout.readline()
    assert folders.DELETED not in run(command=("false",)).stderr
    [file] = cache_dir.glob("v1/run/*/cupy-*/x")
    assert file.read_text() == "2\n"
    other.communicate(b"")
    assert len([*cache_dir.glob("v1/*/run.cupy*")]) == 2


def test_a_build_of_earlier_sources_is_the_newest_again(run, folder, cache_dir):
    header = folder / "answer.h"
    for answer in ("42", "43", "42"):
        header.write_text(f"#define ANSWER {answer}\n")
        assert run().stdout == f"{answer}\n"
    shutil.rmtree(cache_dir / "v1" / "run")
    assert run("--frozen").stdout == "42\n"


@pytest.mark.long
def test_a_run_within_a_frozen_one_is_frozen(run, folder):
    (folder / "build.sh").write_text("cc -c answer.c\n")
    inner = (sys.executable, "-m", "jitkern", "run", "-q", "--", "sh", "build.sh")
    done = run("--frozen", "--report", "report.json", command=inner)
    assert done.returncode == 1
    [refused] = json.loads((folder / "report.json").read_text())["refused"]
    assert (refused["tool"], refused["what"]) == ("cc", "answer.c")
    assert "what is compiled for none of the JITs in docs/run.md is never kept" in done.stderr
    assert "cc 1 (" in run(command=inner).stderr


@pytest.mark.long
def test_a_compiler_with_a_prefix_and_a_version_is_watched(run, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "x86_64-linux-gnu-g++-12").symlink_to(shutil.which("true"))
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    command = ("sh", "-c", "x86_64-linux-gnu-g++-12 -c a.cpp")
    assert run("--frozen", command=command, PATH=path).returncode == 1
    assert "x86_64-linux-gnu-g++-12 1 (" in run(command=command, PATH=path).stderr


@pytest.mark.long
def test_a_push_that_fails_leaves_the_exit_code(run):
    done = run("--push", "file:///proc/nowhere", command=("sh", "-c", "exit 5"))
    assert done.returncode == 5
    done = run("--push", "file:///proc/nowhere")
    assert done.returncode == 0 and "nothing was pushed: file:///proc/nowhere" in done.stderr


@pytest.mark.long
def test_a_damaged_entry_is_not_laid(run, cache_dir, elsewhere, tmp_path):
    run()
    carry(cache_dir, elsewhere["JITKERN_CACHE_DIR"], tmp_path)
    [entry] = Path(elsewhere["JITKERN_CACHE_DIR"]).glob("v1/*/run.tvm_ffi*")
    for artifact in entry.glob("[0-9]"):
        artifact.write_bytes(artifact.read_bytes()[:-1] + b"?")
    done = run("--frozen", **elsewhere)
    assert done.returncode != 0
    assert "laid" not in done.stderr


def test_entries_have_a_kind_and_are_listed(run, cache_dir):
    run()
    [row] = [row for row in cache_tools.rows(Cache(cache_dir)) if row.kind == "run"]
    assert row.op == "run::tvm_ffi"
    assert row.ok


def test_a_signal_reaches_the_command_once(folder, run, cache_dir):
    script = textwrap.dedent("""
        import os, signal, sys, time
        exec(open("app.py").read().replace("__file__", "'%s/app.py'" % os.getcwd()))
        got = []
        signal.signal(signal.SIGTERM, lambda *_: got.append(1))
        print("ready", flush=True)
        while not got:
            time.sleep(0.01)
        time.sleep(0.2)
        sys.exit(len(got))
    """)
    (folder / "waits.py").write_text(script)
    words = [sys.executable, "-m", "jitkern", "run", "--", sys.executable, "waits.py"]
    with subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert "ready" in [process.stdout.readline().strip() for _ in range(2)]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1
    assert [*cache_dir.glob("v1/*/run.tvm_ffi*")]


@pytest.mark.long
def test_a_killed_run_takes_its_command_along(folder, run, cache_dir):
    (folder / "waits.py").write_text(
        PROGRAM + "\nimport os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n"
    )
    words = [sys.executable, "-m", "jitkern", "run", "--", sys.executable, "waits.py"]
    with subprocess.Popen(
        words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        pid = int([process.stdout.readline() for _ in range(2)][1])
        process.kill()
    while Path(f"/proc/{pid}/stat").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        time.sleep(0.01)
    assert not [*cache_dir.glob("v1/*/run.tvm_ffi*")]
    assert "kept: " in run("--frozen").stderr


@pytest.mark.skipif(
    os.geteuid() == 0 and not shutil.which("setpriv"), reason="root writes everywhere"
)
def test_a_root_that_cannot_be_written_serves(run, folder, cache_dir, tmp_path):
    run()
    shutil.rmtree(cache_dir / "v1" / "run")
    layer = cache_dir.rename(tmp_path / "layer")
    done = run("--frozen", JITKERN_SYSTEM_CACHE=str(layer), JITKERN_CACHE_DIR="/proc/nowhere")
    assert done.stdout == "42\n", done.stderr


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare")
@pytest.mark.parametrize("size", ["20k", "72k"])  # less than a start takes, and than an entry takes
def test_a_full_disk_costs_no_run(folder, tmp_path, size):
    (tmp_path / "disk").mkdir()
    run, program = f"{sys.executable} -m jitkern run", f"{sys.executable} app.py"
    script = f"""
mount -t tmpfs -o size={size} tmpfs {tmp_path}/disk || exit 125
export JITKERN_CACHE_DIR={tmp_path}/disk/root
{run} -- {program}
mount -o remount,size=20m {tmp_path}/disk
{run} -- {program}
{run} --frozen -- {program}
"""
    words = ["unshare", "--map-root-user", "--mount", "sh", "-ec", script]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode == 125 or done.stderr.startswith("unshare:"):
        pytest.skip(f"this user may not mount a file system: {done.stderr}")
    assert (done.returncode, done.stdout) == (0, "42\n" * 3), done.stderr
    assert "no space is left" in done.stderr


@pytest.mark.long
def test_two_programs_at_once(run, folder):
    words = [sys.executable, "-m", "jitkern", "run", "--", sys.executable, "app.py"]
    both = [
        subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        for _ in range(2)
    ]
    assert [process.communicate()[0] for process in both] == [b"42\n", b"42\n"]
    assert "compiled: nothing" in run("--frozen").stderr


def test_warn_tells_the_stack_and_lets_it_compile(run, folder):
    # In a thread, as a pool of compilers: the line that asked for it is still the program's.
    (folder / "calls.py").write_text(
        "import subprocess, concurrent.futures as f\n"
        "def build(): subprocess.run(['cc', '-c', 'answer.c'], check=True)\n"
        "f.ThreadPoolExecutor().submit(build).result()\n"
    )
    done = run("--warn", command=(sys.executable, "calls.py"))
    assert done.returncode == 0
    assert "cc compiles answer.c, asked for at" in done.stderr
    assert "calls.py:2" in done.stderr and "concurrent/futures" not in done.stderr
    refused = run("--frozen", command=(sys.executable, "calls.py"))
    assert refused.returncode != 0
    assert "calls.py:2" in refused.stderr


@pytest.mark.long
def test_a_compiler_that_a_shell_starts_is_counted(run, folder):
    command = ("sh", "-c", "cc --version > /dev/null && cc -c answer.c")
    assert "cc 1 (" in run(command=command).stderr
    done = run("--frozen", command=command)
    assert done.returncode == 1
    assert "cc compiles answer.c" in done.stderr


@pytest.mark.long
def test_a_compiler_as_the_command_is_watched_at_each_start(run):
    command = ("cc", "-c", "answer.c")
    for _ in range(2):
        assert "cc 1 (" in run(command=command).stderr
    assert run("--frozen", command=command).returncode == 1


@pytest.mark.long
def test_push_and_pull(run, folder, cache_dir, elsewhere, tmp_path):
    url = f"file://{tmp_path}/bucket"
    assert run().returncode == 0
    [entry] = cache_dir.glob("v1/*/run.tvm_ffi*")
    torch = entry.parent.name.partition("-torch")[2]
    other = Cache(cache_dir)
    inputs = {
        **Manifest.decode((entry / NAME).read_bytes()).inputs,
        "target": f"cuda-sm_80-cu130-torch{torch}",
    }
    with other.staging() as staging:
        (staging / "0").write_bytes(b"of another machine")
        other.publish(Key(inputs, digest_of(inputs), "run.tvm_ffi"), staging, Manifest(inputs))
    pushed = run("--push", url)
    assert pushed.returncode == 0 and "what was pushed is not signed" in pushed.stderr
    [machine] = (tmp_path / "bucket" / "v1").glob("c*-torch*")
    assert machine.name == entry.parent.name
    settings = tmp_path / "settings" / "jitkern"
    settings.mkdir(parents=True)
    (settings / "config.toml").write_text(f'trusted_remotes = ["{url}"]\n')
    done = run("--frozen", **elsewhere, JITKERN_REMOTE=url, XDG_CONFIG_HOME=str(settings.parent))
    assert done.stdout == "42\n", done.stderr


@pytest.mark.long
def test_what_was_cleared_is_compiled_again(run, cache_dir):
    run()
    clear = [sys.executable, "-m", "jitkern", "cache", "clear", "--yes"]
    subprocess.run(clear, check=True, capture_output=True)
    assert not [*cache_dir.glob("v1/*/run.tvm_ffi*"), *cache_dir.glob("v1/run/*/tvm_ffi*")]
    assert run("--frozen").returncode != 0
    assert "kept: 3 files" in run().stderr


@pytest.mark.long
def test_what_was_evicted_is_kept_again_once(run, cache_dir):
    run()
    for entry in cache_dir.glob("v1/*/run.tvm_ffi*"):
        shutil.rmtree(entry)
    assert "kept: 3 files" in run("--frozen").stderr
    assert "kept" not in run("--frozen", "--report", "report.json").stderr


@pytest.mark.long
def test_a_folder_that_no_run_has_used_is_deleted(run, cache_dir):
    run()
    [state] = cache_dir.glob("v1/run/*/tvm_ffi-*.used")
    os.utime(state, (0, 0))
    run(command=("true",), TVM_FFI_CACHE_DIR="/elsewhere")
    assert not [*cache_dir.glob("v1/run/*/tvm_ffi-*")]


@pytest.mark.long
def test_a_folder_that_was_not_used_lately_makes_room(run, cache_dir):
    run()
    [state] = cache_dir.glob("v1/run/*/tvm_ffi-*.used")
    run(command=("true",), TVM_FFI_CACHE_DIR="/elsewhere", JITKERN_MAX_SIZE="1")
    assert state.exists()  # it was used within the hour
    os.utime(state, (time.time() - 7200, time.time() - 7200))
    run(command=("true",), TVM_FFI_CACHE_DIR="/elsewhere", JITKERN_MAX_SIZE="2")
    assert not [*cache_dir.glob("v1/run/*/tvm_ffi-*")]


def imported(script):
    """The modules that the command imports to run a program."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", script, "run", "--", "true"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}


def test_a_run_with_nothing_new_imports_next_to_nothing(run, cache_dir, tmp_path):
    script = shutil.copy(REPOSITORY / "jitkern" / "cli" / "jitkern", tmp_path)
    assert "jitkern.adopt.run" in imported(script)
    few = imported(script)
    assert "jitkern.adopt.start" in few
    unused = {"argparse", "contextlib", "json", "pathlib", "re", "runpy", "typing"}
    assert not few & {*unused, "jitkern.config"}


@pytest.mark.parametrize("mode", ["--frozen", "-q"])
@pytest.mark.long
def test_what_arrives_between_two_runs_is_laid(mode, run, cache_dir, elsewhere, tmp_path):
    run()
    other = {"JITKERN_CACHE_DIR": elsewhere["JITKERN_CACHE_DIR"]}
    for _ in range(2):
        assert run(command=(sys.executable, "-c", "exit(5)"), **other).returncode == 5
    carry(cache_dir, other["JITKERN_CACHE_DIR"], tmp_path)
    show = (sys.executable, "-c", "import os; print(*os.listdir(os.environ['TVM_FFI_CACHE_DIR']))")
    assert run(mode, command=show, **other).stdout.startswith("answer_")


@pytest.mark.long
def test_what_a_run_with_a_note_writes_is_kept(run, cache_dir):
    write = "mkdir -p $CUPY_CACHE_DIR; echo $0 > $CUPY_CACHE_DIR/$0"
    for name in ("1", "2", "2", "3"):
        run(command=("sh", "-c", write, name))
    assert len([*cache_dir.glob("v1/*/run.cupy*")]) == 3


@pytest.mark.long
def test_another_compiler_of_the_same_name_builds_again(run, tmp_path):
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "cc"
    text = f'#!/bin/sh\n[ $1 = --version ] && echo 1 && exit\nexec {shutil.which("cc")} "$@"\n'
    compiler.write_text(text)
    compiler.chmod(0o755)
    path = {"PATH": f"{compiler.parent}{os.pathsep}{os.environ['PATH']}"}
    run(**path)
    assert run("--frozen", **path).returncode == 0
    compiler.write_text(text.replace("echo 1", "echo 2"))
    assert "ninja compiles" in run("--frozen", **path).stderr
    compiler.unlink()
    assert run("--frozen", PATH="/usr/bin:/bin").returncode != 0  # that is another one, too


def test_a_folder_that_a_layer_fills_outlasts_a_clear(tmp_path):
    cache = Cache(tmp_path / "root", (tmp_path / "layer",), fsync=False)
    state = tmp_path / "root" / "v1" / "run" / "cpu-x86_64-torch2.13.0" / "triton-1.used"
    state.with_suffix("").mkdir(parents=True)
    state.touch()
    entry = tmp_path / "layer" / "v1" / state.parent.name / f"run.triton.1-{2:016}"
    entry.mkdir(parents=True)
    folders.forget(cache)
    assert state.exists() and state.with_suffix("").exists()
    entry.rmdir()
    folders.forget(cache)
    assert not state.exists() and not state.with_suffix("").exists()


def test_adopt_takes_what_is_there(run, cache_dir, tmp_path):
    folder = tmp_path / "triton" / "ABCDEF"
    folder.mkdir(parents=True)
    (folder / "kernel.cubin").write_bytes(b"cubin")
    (folder / "kernel.lock").write_bytes(b"")
    (folder / "link").symlink_to("kernel.cubin")
    (folder / "odd\nname").write_bytes(b"odd")
    (folder.parent / "README").write_bytes(b"no kernel")
    words = [
        sys.executable,
        "-m",
        "jitkern",
        "adopt",
        "triton",
        "--from",
        str(folder.parent),
        "--json",
    ]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    [told] = json.loads(done.stdout)["adopted"]
    assert (told["files"], told["bytes"]) == (1, 5)
    assert told["left_out"] == [
        "'ABCDEF/link': it is no regular file",
        "'ABCDEF/odd\\nname': its name is not printable",
        "README: it is in no folder that triton makes under `jitkern run`",
    ]
    show = (
        "import os, pathlib; print(*pathlib.Path(os.environ['TRITON_CACHE_DIR']).rglob('*.cubin'))"
    )
    assert run(command=(sys.executable, "-c", show)).stdout.endswith("ABCDEF/kernel.cubin\n")


@pytest.mark.long
def test_adopt_leaves_out_builds_that_cannot_be_proven(cache_dir, tmp_path):
    (tmp_path / "ffi" / "a_1").mkdir(parents=True)
    (tmp_path / "ffi" / "a_1" / "a.so").write_bytes(b"elf")
    words = [sys.executable, "-m", "jitkern", "adopt", "tvm_ffi", "--from", str(tmp_path / "ffi")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "left out: a_1: what it depends on is not on record" in done.stderr
    assert (
        subprocess.run([*words[:-3], "tvm-ffi"], capture_output=True, check=False).returncode == 2
    )


@pytest.mark.long
def test_adopt_refuses_what_it_cannot_use(tmp_path):
    for words, says in (
        (("--python", "/bin/true"), "--python /bin/true: it is no Python"),
        (("--python", "/nowhere"), "--python /nowhere: No such file or directory"),
        (("numba", "--from", tmp_path), "it is in no folder that numba makes under `jitkern run`"),
    ):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / "f.nbi").write_text("index")
        command = [sys.executable, "-m", "jitkern", "adopt", *map(str, words)]
        assert says in subprocess.run(command, capture_output=True, text=True, check=False).stderr


def test_a_long_run_keeps_what_is_settled(cache_dir, tmp_path, monkeypatch):
    this = Run(["true"])
    folder = cupy_of(this)
    (folder.path / "new.cubin").write_bytes(b"1")
    (folder.path / "old.cubin").write_bytes(b"2")
    os.utime(folder.path / "old.cubin", (1, 1))
    this.keep(settled=60.0)
    this.keep(settled=60.0)
    [entry] = cache_dir.glob("v1/*/run.cupy*")
    assert (entry / "0").read_bytes() == b"2"
    this.keep()
    assert len([*cache_dir.glob("v1/*/run.cupy*")]) == 2


def test_a_file_removed_while_others_are_kept_is_no_error(cache_dir, monkeypatch):
    this = Run(["true"])
    folder = cupy_of(this)
    (folder.path / "a").write_bytes(b"1")
    this.keep()
    os.utime(folder.path / "a", (1, 1))  # so it is read again
    monkeypatch.setattr(folders, "digest", lambda path: Path(path, "gone").read_bytes())
    this.keep()
    assert len([*cache_dir.glob("v1/*/run.cupy*")]) == 1


def test_an_entry_with_a_path_that_leads_elsewhere_is_not_laid(cache_dir, tmp_path):
    this = Run(["true"])
    folder = cupy_of(this)
    (folder.path / "a").write_bytes(b"1")
    this.keep()
    [entry] = Cache(cache_dir).paths()
    manifest = Manifest.decode((entry / NAME).read_bytes())
    odd = {"files": {"0": "../../../../stolen"}, "times": {"0": "now"}}
    bad = manifest._replace(meta={**manifest.meta, **odd})
    (entry / NAME).write_bytes(bad.encode())
    shutil.rmtree(folder.path)
    Run(["true"]).lay()
    assert not [*cache_dir.rglob("stolen")]
    assert not (folder.path / "a").exists()


STARTS = """
import ctypes, os, subprocess
words = ["cc", "-c", "answer.c"]
for start in (
    lambda: subprocess.run(words),
    lambda: subprocess.run(map(str, words)),
    lambda: subprocess.Popen(words, -1, None, None, None, None, None, True, False, None, {**os.environ}).wait(),
    lambda: subprocess.run("cc -c answer.c", shell=True),
    lambda: subprocess.run("cc -c missing.c || cc -c answer.c", shell=True),
    lambda: subprocess.run(["bash", "-c", "cd . && cc -c answer.c"]),
    lambda: os.system("cc -c answer.c"),
    lambda: ctypes.CDLL(None).system(b"exec cc -c answer.c"),
    lambda: os.waitpid(os.fork() or subprocess.run(words) and os._exit(0), 0),
):
    try:
        start()
    except RuntimeError:
        pass
"""


@pytest.mark.parametrize(
    ("command", "tool"),
    [
        (["/opt/bin/x86_64-linux-gnu-g++-12", "-c", "x.cc"], "x86_64-linux-gnu-g++-12"),
        (["bash", "-c", "nvcc x.cu"], "nvcc"),
        ("/usr/bin/gcc -c 'x y.c' 2>&1", "gcc"),
        ("gcc -c x.c || true", ""),  # which the shim sees
        ("cd build && /usr/bin/gcc -c x.c", ""),
        ("gcc --version", ""),
        ("/usr/bin/gcc 2>&1 --version", ""),
        ("2>/dev/null '/usr/bin/gcc' -DX='f(1)' $FLAGS -c x.c\n", "gcc"),
        ("/usr/bin/gcc -c x.c; gcc -c y.c", ""),
        ("gcc 'x.c", ""),
        (Path("gcc"), ""),
        ("", ""),
    ],
)
def test_commands_that_compile_are_told_from_others(command, tool):
    assert events.compile_in(command)[0] == tool


def test_a_compiler_is_counted_once_however_it_is_started(run, folder):
    (folder / "starts.py").write_text(STARTS)
    assert "cc 10 (" in run(command=(sys.executable, "starts.py")).stderr
    (folder / "answer.o").unlink()
    assert (
        "compiled: nothing; refused: "
        in run("--frozen", command=(sys.executable, "starts.py")).stderr
    )
    assert not (folder / "answer.o").exists()


@pytest.mark.long
def test_a_process_may_outlive_the_run(run, folder, tmp_path):
    late = f"{sys.executable} -c 'print(1)' > {tmp_path}/late 2>&1; touch {tmp_path}/done"
    run(command=("sh", "-c", f"(sleep 1; {late}) > /dev/null 2>&1 &"))
    while not (tmp_path / "done").exists():
        time.sleep(0.05)
    assert (tmp_path / "late").read_text() == "1\n"
