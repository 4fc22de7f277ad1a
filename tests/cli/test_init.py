"""`jitkern init` writes what works at once: a package, whose wheel works elsewhere, or a kernel folder."""

import errno
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from helpers import H100, REPOSITORY, kernels, last_json, needs_cute, needs_cutile

from jitkern.compilers.cuda import toolkit

WRITTEN = {
    ".gitignore", "MANIFEST.in", "pyproject.toml", "README.md", "bench.py", "tests/test_kernels.py", "src/mypkg/__init__.py",
    "src/mypkg/kernels/scale/kernel.py", "src/mypkg/kernels/scale/scale.cu", "src/mypkg/kernels/scale/scale.cpp",
    "src/mypkg/kernels/add_relu/kernel.py", "src/mypkg/kernels/add_relu/add_relu_triton.py",
    "src/mypkg/kernels/add_relu/add_relu.cpp",
}  # fmt: skip
BINARIES = (".so", ".o", ".a", ".pyc", ".cubin", ".fatbin", ".ptx", ".dll", ".pyd")


def files_in(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def command(*arguments, **environment):
    return subprocess.run(
        arguments, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )


@pytest.fixture
def here(tmp_path, monkeypatch):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_a_package_has_what_one_needs_and_says_what_is_next(cli, here):
    code, out, err = cli("init", "mypkg")
    assert code == 0
    assert files_in(here / "mypkg") == WRITTEN
    assert {line.removeprefix("mypkg/") for line in out.split()} == WRITTEN
    assert "cd mypkg && pip install -e '.[test]' && pytest && jitkern prewarm mypkg" in err


def test_the_name_stands_wherever_it_must(cli, here):
    for name in ("scale", "my_scale", "mypkg_2"):
        assert cli("init", name)[0] == 0
        project = here / name
        assert files_in(project) == {file.replace("mypkg", name) for file in WRITTEN}
        declared = (project / "src" / name / "kernels" / "scale" / "kernel.py").read_text()
        assert f'"{name}::scale(Tensor x, float alpha) -> Tensor"' in declared
        assert f'{name} = "{name}"' in (project / "pyproject.toml").read_text()
        for path in project.rglob("*.py"):
            compile(path.read_text(), str(path), "exec")


@pytest.mark.long
def test_the_bench_says_how_it_is_used(cli, here):
    assert cli("init", "mypkg")[0] == 0
    program = [sys.executable, "-W", "ignore", "mypkg/bench.py", "--help"]
    done = command(*program, PYTHONPATH=str(here / "mypkg" / "src"))
    assert (done.returncode, "[{cpu,cuda}]" in done.stdout) == (0, True), done.stderr


def test_nothing_is_overwritten(cli, here):
    for arguments in (("mypkg",), ("--kernel", "relu")):
        assert cli("init", *arguments)[0] == 0
        before = {path: path.read_bytes() for path in here.rglob("*") if path.is_file()}
        code, out, err = cli("init", *arguments)
        assert (code, out, "exists already; nothing was written" in err) == (1, "", True)
        assert {path: path.read_bytes() for path in here.rglob("*") if path.is_file()} == before
    (here / "link").symlink_to(here / "nowhere")
    assert cli("init", "link")[0] == 1


@pytest.mark.long
def test_a_package_is_whole_or_not_there(cli, here, monkeypatch):
    done = command(
        "/bin/sh", "-c", f"{sys.executable} -W ignore -m jitkern init mypkg | true; exec ls -A"
    )
    assert done.stdout == "mypkg\n", done.stderr
    assert files_in(here / "mypkg") == WRITTEN
    write, left = Path.write_text, [3]

    def fill(path, *args, **kwargs):
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, "the disk is full")
        return write(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", fill)
    code, out, err = cli("init", "other")
    assert (code, out, "the disk is full" in err) == (1, "", True)
    assert [path.name for path in here.iterdir()] == ["mypkg"]
    assert cli("init", "other")[0] == 0


@pytest.mark.parametrize(
    "name",
    ["", ".", "../x", "a/b", "a.b", "a-b", "2x", "_x", "naïve", "class", "double", "json", "torch",
     "jitkern", "aten", "a::b", "x\n"],
)  # fmt: skip
def test_a_name_that_would_not_work_is_refused(cli, here, name):
    code, out, err = cli("init", name)
    assert (code, out, "is not a usable module name" in err) == (2, "", True)
    for kernel in (f"{name}::relu", f"relu::{name}"):
        if name not in ("", "a::b"):
            assert cli("init", "--kernel", kernel)[0] == 2
    assert not list(here.iterdir())


@pytest.mark.parametrize("name", ["T", "alpha", "grad", "main", "std", "blockIdx"])
def test_a_kernel_name_that_its_files_use_is_refused(cli, here, name):
    for kernel in (name, f"mylib::{name}"):
        code, out, err = cli("init", "--kernel", kernel)
        assert (code, out, f"`{name}` cannot name a kernel" in err) == (2, "", True)
    assert not list(here.iterdir())
    assert cli("init", "--kernel", f"{name}::relu")[0] == 0


def test_a_kind_is_for_one_kernel(cli, here):
    assert cli("init", "mypkg", "--kind", "cutile")[0] == 2
    assert not list(here.iterdir())
    assert cli("init", "--kernel", "relu", "--kind", "cutile")[0] == 0
    assert files_in(here) == {"relu/kernel.py", "relu/relu.py"}


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [pytest.param("cutile", marks=needs_cutile), pytest.param("cute", marks=needs_cute)]
)
def test_a_kernel_in_a_language_of_nvidia_works_at_once(cli, here, kind):
    """The gradient of the op is an op, too."""
    assert cli("init", "--kernel", "mylib::relu", "--kind", kind)[0] == 0
    target = "cuda-sm_90-cu130-torch2.13.0"
    done = command(sys.executable, "-W", "ignore", "-m", "jitkern", "prewarm", "relu", "--target", target)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "6 kernels" in done.stdout
    assert "12 records" in done.stdout


@pytest.mark.long
def test_a_kernel_folder_works_at_once(cli, here, run_python):
    assert cli("init", "--kernel", "twice")[0] == 0
    assert cli("init", "--kernel", "mylib::thrice")[0] == 0
    assert files_in(here) == {
        f"{name}/{file}" for name in ("twice", "thrice") for file in ("kernel.py", f"{name}.cu", f"{name}.cpp")
    }  # fmt: skip
    done = run_python(
        f"import sys; sys.path.insert(0, {str(here)!r})\n"
        "import torch, jitkern, twice.kernel as s, thrice.kernel\n"
        "x = torch.randn(5, dtype=torch.float64, requires_grad=True)\n"
        "assert torch.equal(s.twice(x, 3.0), 3 * x)\nassert torch.autograd.gradcheck(s.twice, (x, 0.5))\n"
        "torch.library.opcheck(s.twice.overload, (x, 0.5))\n"
        "print(torch.ops.twice.twice(x, 2.0).shape, torch.ops.mylib.thrice(x, 2.0).shape, jitkern.stats()['compiles'])"
    )  # fmt: skip
    assert done.stdout == "torch.Size([5]) torch.Size([5]) 2\n", done.stderr
    target = ["--target", H100] if toolkit.nvrtc_libraries() else []
    done = command(
        sys.executable, "-W", "ignore", "-m", "jitkern", "prewarm", "twice", "--json", *target
    )
    statuses = [row["status"] for row in kernels(last_json(done.stdout))]
    assert statuses == ["built"] * 4, done.stderr  # a kernel for each dtype of the samples


@pytest.mark.long
def test_a_new_project_works_where_it_was_written(cli, here):
    assert cli("init", "mypkg")[0] == 0
    jitkern = (sys.executable, "-W", "ignore", "-m", "jitkern")
    done = command(*jitkern, "list", "mypkg")
    assert (done.returncode, done.stdout.count("mypkg::")) == (0, 2), done.stderr
    done = command(*jitkern, "prewarm", "mypkg", "--json")
    built = {row["op"] for row in kernels(last_json(done.stdout))}
    assert built == {"mypkg::scale", "mypkg::add_relu"}
    done = command(sys.executable, "-m", "pytest", "-q", "mypkg", JITKERN_COMPILE="never")
    assert (done.returncode, "3 passed" in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.fixture
def environment(tmp_path):
    """A new environment that has what this one has, but jitkern from a wheel; its folder of programs."""
    root, source = tmp_path / "venv", tmp_path / "source"
    venv.create(root, symlinks=True)
    (site,) = root.glob("lib/python*/site-packages")
    (site / "outer.pth").write_text(sysconfig.get_path("purelib") + "\n")
    source.mkdir()
    for name in ("jitkern", "kernels_src", "cache_tools"):
        shutil.copytree(
            REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__")
        )
    for name in ("pyproject.toml", "DESCRIPTION.md"):
        shutil.copy(REPOSITORY / name, source)
    install(wheel_of(source, tmp_path / "dist"), root)
    return root / "bin"


def wheel_of(project, output):
    done = command(
        sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", str(project), "-w", str(output)
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = output.glob(f"{project.name.replace('source', 'jitkern')}-*.whl")
    return wheel


def install(wheel, root):
    done = command(
        sys.executable, "-m", "pip", "--python", str(root / "bin" / "python"), "install", "-q", "--no-deps",
        "--no-index", str(wheel),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.common_cache
def test_the_printed_next_step_works_in_a_new_environment(environment, here):
    for program in ("pip", "pytest"):
        script = f"#!{environment / 'python'}\nimport runpy\nrunpy.run_module('{program}', run_name='__main__')\n"
        (environment / program).write_text(script)
        (environment / program).chmod(0o755)
    path = f"{environment}:{os.environ['PATH']}"
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PATH": path}
    line = command("jitkern", "init", "mypkg", **offline).stderr.partition("now: ")[2]
    done = command("/bin/sh", "-ec", line, **offline)
    assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    assert "3 passed" in done.stdout and " 0 failed, 0 skipped" in done.stdout
    where = command(str(environment / "python"), "-c", "import mypkg; print(mypkg.__file__)")
    assert where.stdout == f"{here}/mypkg/src/mypkg/__init__.py\n", where.stderr


@pytest.mark.long
def test_its_wheel_holds_no_binary_and_works_when_installed(environment, here, monkeypatch):
    def run(*arguments):
        done = command(str(environment / arguments[0]), *arguments[1:], PYTHONWARNINGS="ignore")
        assert done.returncode == 0, f"{arguments}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    run("jitkern", "init", "mypkg")
    wheel = wheel_of(here / "mypkg", here)
    assert wheel.name == "mypkg-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        inside = {name.removeprefix("src/") for name in WRITTEN if name.startswith("src/")}
        assert names == inside
        assert not [name for name in archive.namelist() if name.endswith(BINARIES)]
        assert not [name for name in names if b"\0" in archive.read(name)]
    install(wheel, environment.parent)
    elsewhere = here / "elsewhere"
    shutil.copytree(here / "mypkg" / "tests", elsewhere / "tests")
    shutil.copy(here / "mypkg" / "bench.py", elsewhere)
    shutil.rmtree(here / "mypkg")
    monkeypatch.chdir(elsewhere)
    places = run("python", "-c", "import mypkg, jitkern; print(mypkg.__file__, jitkern.__file__)")
    assert all(place.startswith(str(environment.parent)) for place in places.split())
    assert run("jitkern", "list").count("mypkg::") == 2
    report = last_json(run("jitkern", "prewarm", "mypkg", "--json"))
    assert (report["failed"], report["skipped"]) == (0, 0)
    assert len([row for row in kernels(report) if row["status"] == "built"]) >= 4
    monkeypatch.setenv("JITKERN_COMPILE", "never")
    assert "3 passed" in run("python", "-m", "pytest", "-q", "tests")
    assert run("python", "bench.py", "cpu").count("us") == 4
