"""What `jitkern doctor` says of a machine, and that it changes nothing on it."""

import errno
import fcntl
import importlib.metadata
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import types

import pytest
import torch

from jitkern import config, jit, testing
from jitkern.cache_tools import health
from jitkern.cache_tools.check import Check, Look, Problem
from jitkern.compilers.cpp import cc_build
from jitkern.compilers.cuda import toolkit
from jitkern.config import Config
from jitkern.errors import SettingError
from jitkern.files import trust
from jitkern.runtime import binding
from jitkern.target import Target

IMPORTS = """
import json, os
from dataclasses import asdict
from jitkern import config
from jitkern.cache_tools.health import table
"""
SHOW = "print(json.dumps([asdict(look.check()) for look in table(config.current())]))"
OF_A_CACHE = {
    "cache", "cache owners", "cache writable", "cache executable", "cache file system", "cache locks",
    "cache space", "cache size",
}  # fmt: skip
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")


@pytest.fixture
def root(cache_dir):
    """An empty cache that is there."""
    cache_dir.mkdir(mode=0o700)
    return cache_dir


@pytest.fixture
def mounted(tmp_path):
    """What is found of a cache that is the root of a tmpfs with these options."""
    point = tmp_path / "mounted"
    point.mkdir()

    def look(options):
        mount = ["mount", "-t", "tmpfs", "-o", f"mode=700,{options}", "tmpfs", str(point)]
        alone = not os.geteuid() and shutil.which("unshare")
        if not alone or subprocess.run(["unshare", "-m", *mount], check=False).returncode:
            pytest.skip("needs to mount a file system: as root, in a namespace of its own")
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", f'{shlex.join(mount)} && exec "$@"', "sh", sys.executable, "-c", IMPORTS + SHOW],
            env={**os.environ, "JITKERN_CACHE_DIR": str(point)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return by_name(json.loads(done.stdout))

    return look


KEY = "A" * 43 + "="


def by_name(rows):
    return {row["name"]: Check(**row) for row in rows}


def looked(**settings):
    """The checks of the cache under these settings, by name."""
    with config.using(**settings) as now:
        return {look.name: look.check() for look in health.table(now)}


def told(cli, *arguments):
    """The checks of the whole command, by name."""
    _, out, _ = cli("doctor", "--json", *arguments)
    return by_name(json.loads(out.splitlines()[-1])["checks"])


def everything_in(folder):
    return sorted((str(path), path.lstat().st_size) for path in folder.rglob("*"))


# The command


def test_json_has_its_schema(cli, root):
    code, out, _ = cli("doctor", "--json")
    report = json.loads(out.splitlines()[-1])
    assert set(report) == {"schema", "ok", "checks"} and report["schema"] == 1
    assert report["ok"] is all(check["ok"] for check in report["checks"])
    assert code == (0 if report["ok"] else 1)
    for check in report["checks"]:
        assert list(check) == ["name", "ok", "value", "origin", "remedy"]
        assert type(check["ok"]) is bool
        assert all(type(check[field]) is str for field in ("name", "value", "origin", "remedy"))
        assert check["ok"] or check["remedy"], check


def test_doctor_names_what_is_missing_and_the_line_that_mends_it(cli, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(toolkit, "nvrtc_libraries", dict)
    monkeypatch.setattr("jitkern.target.nvml_capabilities", lambda: [(9, 0)])
    code, out, _ = cli("doctor", "--json")
    report = json.loads(out.splitlines()[-1])
    checks = by_name(report["checks"])
    assert (code, report["ok"], checks["nvrtc"].ok) == (1, False, False)
    assert checks["nvrtc"].remedy == 'pip install "cuda-toolkit[nvrtc]==13.0.*"'
    assert {
        "python", "jitkern", "torch", "cc", "c++", "nvcc", "triton", "platformdirs", "ninja", "cryptography",
        "JITKERN_CACHE_DIR", "JITKERN_MAX_SIZE", "trusted", "trusted_keys", "signed", "settings file", *OF_A_CACHE,
    } <= set(checks)  # fmt: skip
    lines = cli("doctor")[1].splitlines()
    assert "does not work as it should: " in lines[0]
    assert any(line.startswith("FAIL nvrtc") for line in lines[1:4])
    assert not any("JITKERN_MAX_SIZE" in line for line in lines)
    assert "JITKERN_MAX_SIZE     10 GiB  (default)" in cli("doctor", "-v")[1]


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_a_machine_without_a_gpu_misses_no_cuda(cli, monkeypatch, cuda):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr("jitkern.target.nvml_capabilities", list)
    monkeypatch.setattr(toolkit, "nvrtc_libraries", dict)
    monkeypatch.setattr(toolkit, "include_directories", lambda major: [])
    code, out, _ = cli("doctor", "--json")
    checks = by_name(json.loads(out.splitlines()[-1])["checks"])
    for name in ("nvrtc", "<cuda_fp16.h>", "<crt/mma.h>", "<cub/cub.cuh>"):
        assert (checks[name].ok, checks[name].remedy) == (True, "")
        assert "missing: needed only to compile for GPUs: pip install" in checks[name].value
    assert code == 0, out


@pytest.mark.parametrize(
    ("cuda", "installed", "value", "remedy"),
    [
        ("13.0", [(13, 5)], "13.5 at lib", ""),  # which builds for each CUDA 13
        ("13.2", [(13, 0), (13, 2)], "13.0 at lib, 13.2 at lib", ""),
        (None, [(13, 5)], "13.5 at lib", ""),
        ("12.8", [(13, 5)], "13.5 at lib", 'pip install "cuda-toolkit[nvrtc]==12.8.*"'),
        ("12.6", [(12, 6)], "12.6 at lib", 'pip install "cuda-toolkit[nvrtc]==12.8.*"'),
    ],
)
@pytest.mark.parametrize("gpus", [[], [(9, 0)]])
def test_an_nvrtc_that_cannot_build_for_torch_is_told(
    cli, monkeypatch, gpus, cuda, installed, value, remedy
):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr("jitkern.target.nvml_capabilities", lambda: gpus)
    monkeypatch.setattr(toolkit, "nvrtc_libraries", lambda: dict.fromkeys(installed, ("lib", None)))
    check = told(cli)["nvrtc"]
    if remedy and not gpus:
        assert (check.ok, check.remedy) == (True, "")
        assert check.value == f"{value}: needed only to compile for GPUs: {remedy}"
    else:
        assert (check.ok, check.value, check.remedy) == (not remedy, value, remedy)


def test_a_missing_cuda_header_is_told(cli, monkeypatch, tmp_path):
    (tmp_path / "include" / "cub").mkdir(parents=True)
    for name in ("cuda_fp16.h", "cub/cub.cuh"):
        (tmp_path / "include" / name).touch()
    (tmp_path / "include" / "cuda.h").write_text("#define CUDA_VERSION 13050\n")
    monkeypatch.setattr("jitkern.target.nvml_capabilities", lambda: [(9, 0)])
    monkeypatch.setattr(toolkit, "wheel_prefixes", lambda: [tmp_path])
    monkeypatch.setattr(toolkit, "cuda_homes", list)
    names = ("cuda_fp16.h", "crt/mma.h", "cub/cub.cuh")
    for cuda, there in (("13.0", True), ("12.8", False)):  # headers of another major version
        monkeypatch.setattr(torch.version, "cuda", cuda)
        checks = told(cli)
        runtime, crt, cub = (checks[f"<{name}>"] for name in names)
        assert (runtime.ok, cub.ok, crt.ok) == (there, there, False)
        assert crt.value == "missing" and crt.remedy.startswith('pip install "cuda-toolkit[')
        assert crt.remedy.endswith(f']=={cuda}.*"')


def test_a_check_that_is_fine_names_no_remedy_and_a_warning_does(cli, root):
    root.parent.chmod(0o775)
    out = cli("doctor")[1]
    assert "warn cache owners" in out and f"chmod g-w {root.parent}\n" in out
    assert "ok   cache writable" in out and "make it writable" not in out


@pytest.mark.long
def test_doctor_runs_without_torch_a_home_and_a_cache(run_python, tmp_path):
    code = (
        "import os, sys\nsys.modules['torch'] = None\nos.environ.pop('HOME', None)\nos.environ.pop('JITKERN_CACHE_DIR')\n"
        "from jitkern.cli import main\nsys.exit(main(['doctor', '--json', '--cache-dir', 'not/there']))"
    )
    done = run_python(code)
    assert done.returncode == 1, done.stderr
    checks = by_name(json.loads(done.stdout)["checks"])
    assert checks["torch"].remedy == "pip install torch" and checks["cache writable"].ok
    assert not (tmp_path / "not").exists()


def test_a_compiler_with_arguments_is_looked_for_by_its_name(cli):
    with config.using(cc=f"{sys.executable} -I", cxx="no-such-compiler"):
        checks = told(cli)
    assert checks["cc"].value.startswith("Python 3")
    assert not checks["c++"].ok and checks["c++"].remedy == cc_build.REMEDY


# Settings


def test_every_setting_has_its_value_and_where_it_comes_from(cli, tmp_path, monkeypatch):
    key = "ed25519 " + "A" * 43 + "="
    file = tmp_path / "config.toml"
    file.write_text(f'compile = "never"\ntrusted = ["/a", "/b"]\ntrusted_keys = ["{key}"]\n')
    file.chmod(0o600)
    settings = Config.from_env({"JITKERN_JOBS": "3", "PATH": os.environ["PATH"]}, files=[file])
    testing.set_settings(monkeypatch, settings)
    checks = told(cli, "--cache-dir", str(tmp_path / "c"))
    found = {name: (checks[name].value, checks[name].origin) for name in checks}
    assert found["JITKERN_COMPILE"] == ("never", str(file))
    assert found["trusted"] == ("/a:/b", str(file))
    assert found["JITKERN_JOBS"] == ("3", "environment")
    assert found["JITKERN_FSYNC"] == ("1", "default")
    assert found["JITKERN_CACHE_DIR"] == (str(tmp_path / "c"), "--cache-dir")
    assert found["cache"][1] == "--cache-dir"
    assert {s.variable or s.name for s in config.SETTINGS} <= set(found)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("JITKERN_CACHEDIR", ": did you mean JITKERN_CACHE_DIR?"),
        ("JITKERN_SYSTEM_CACHES", ": did you mean JITKERN_SYSTEM_CACHE?"),
        ("JITKERN_ZZ", ""),
        ("JITKERN_", ""),
    ],
)
def test_an_unknown_variable_fails_with_the_nearest_name(cli, name, near):
    with config.using(environment={name: "x"}):
        check = told(cli)[name]
    assert (check.ok, check.origin) == (False, "environment")
    assert check.value == f"is not a setting{near}"
    assert f"unset {name}" in check.remedy


@pytest.mark.parametrize("name", ["TRUSTED", "TRUSTED_KEYS", "SIGNED"])
def test_trust_in_the_environment_is_ignored_and_told(cli, name):
    with config.using(environment={f"JITKERN_{name}": "x"}):
        check = told(cli)[f"JITKERN_{name}"]
    assert not check.ok and "only in a settings file" in check.value
    assert "config.toml" in check.remedy


# The cache


def test_a_healthy_cache_passes_every_check(root):
    checks = looked()
    assert set(checks) == OF_A_CACHE
    assert all(check.ok for check in checks.values()), checks
    assert checks["cache"].value == str(root)
    assert not any(checks[name].remedy for name in ("cache", "cache writable", "cache executable"))


@pytest.mark.parametrize("folders", [None, "", "v1", "v1/tmp"])
def test_doctor_leaves_nothing_behind(cli, cache_dir, tmp_path, folders):
    if folders is not None:
        (cache_dir / folders).mkdir(parents=True)
        cache_dir.chmod(0o700)
    before = everything_in(tmp_path)
    assert told(cli)["cache writable"].ok
    assert everything_in(tmp_path) == before


def test_what_is_not_there_is_judged_by_what_is_above_it(cache_dir, monkeypatch):
    checks = looked()
    assert checks["cache"].value == f"{cache_dir}, which does not exist yet"
    assert checks["cache writable"].value == f"the cache can be made in {cache_dir.parent}"
    flags = types.SimpleNamespace(f_flag=os.ST_NOEXEC)
    monkeypatch.setattr(os, "statvfs", lambda _: flags)
    assert "noexec mount" in looked()["cache executable"].value


@pytest.mark.long
def test_no_code_can_be_loaded_from_a_noexec_mount(mounted):
    check = mounted("noexec")["cache executable"]
    assert not check.ok and "noexec" in check.value and "JITKERN_CACHE_DIR" in check.remedy


@pytest.mark.long
def test_a_read_only_mount_cannot_be_written(mounted):
    checks = mounted("ro")
    assert not checks["cache writable"].ok
    assert "Read-only file system" in checks["cache writable"].value
    assert "JITKERN_SYSTEM_CACHE" in checks["cache writable"].remedy
    assert checks["cache executable"].ok
    assert checks["cache file system"].value == "tmpfs"


@pytest.mark.parametrize("below", ["", "below/it"])
def test_a_file_in_place_of_the_cache_is_named(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("")
    checks = looked(cache_dir=file / below)
    assert checks["cache"].value == f"{file} is not a directory"
    assert checks["cache"].remedy.startswith("remove it, or point JITKERN_CACHE_DIR")
    assert not checks["cache writable"].ok


def test_an_untrusted_root_fails_and_nothing_is_tried_in_it(root):
    root.chmod(0o777)
    written = root.stat().st_mtime_ns
    checks = looked()
    assert (checks["cache"].ok, checks["cache"].remedy) == (False, f"chmod 700 {root}")
    assert "not trusted" in checks["cache writable"].value and checks["cache executable"].ok
    assert root.stat().st_mtime_ns == written
    assert looked(trusted=(root,))["cache"].ok


def test_a_parent_that_all_can_write_fails_unless_it_is_sticky(tmp_path):
    parent = tmp_path / "shared"
    (parent / "cache").mkdir(parents=True, mode=0o700)
    parent.chmod(0o777)
    checks = looked(cache_dir=parent / "cache")
    assert not checks["cache"].ok and not checks["cache owners"].ok
    assert checks["cache owners"].remedy.startswith(f"chmod o-w {parent}")
    parent.chmod(0o1777)
    assert looked(cache_dir=parent / "cache")["cache owners"].remedy == ""


def test_a_parent_that_its_group_can_write_is_a_warning(tmp_path):
    parent = tmp_path / "home"
    (parent / "cache").mkdir(parents=True, mode=0o700)
    parent.chmod(0o775)
    check = looked(cache_dir=parent / "cache")["cache owners"]
    assert (check.ok, check.remedy) == (True, f"chmod g-w {parent}")


@needs_root
def test_a_parent_of_another_user_is_a_warning(tmp_path):
    parent = tmp_path / "theirs"
    (parent / "cache").mkdir(parents=True, mode=0o700)
    os.chown(parent, 12345, -1)
    check = looked(cache_dir=parent / "cache")["cache owners"]
    assert check.ok and "belongs to user 12345" in check.value and check.remedy


@pytest.mark.long
def test_a_cache_out_of_reach_is_a_failed_check(tmp_path, run_python):
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    done = run_python(
        f"{IMPORTS}\nos.geteuid() or os.setuid(65534)\n{SHOW}",
        JITKERN_CACHE_DIR=str(closed / "cache"), XDG_CONFIG_HOME="/none",
    )  # fmt: skip
    closed.chmod(0o700)
    assert done.returncode == 0, done.stderr
    checks = by_name(json.loads(done.stdout))
    assert set(checks) >= OF_A_CACHE and not checks["cache writable"].ok


@pytest.mark.parametrize(
    "kind", ["nfs4", "cifs", "lustre", "fuse.sshfs", "9p", "fuse.fuse-overlayfs", "xfs"]
)
def test_a_network_file_system_is_a_warning(root, tmp_path, monkeypatch, kind):
    program = tmp_path / "bin" / "df"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho Type\necho {kind}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent))
    check = looked()["cache file system"]
    if kind in ("xfs", "fuse.fuse-overlayfs"):
        assert check == Check("cache file system", ok=True, value=kind)
    else:
        assert check.ok and check.value.startswith(kind) and "locks are node-local" in check.value
        assert f"JITKERN_SYSTEM_CACHE={root}" in check.remedy


def test_without_df_the_file_system_is_unknown(root, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    check = looked()["cache file system"]
    assert check.ok and check.value.startswith("unknown: ")


@pytest.mark.parametrize(
    ("blocks", "inodes", "files", "ok"),
    [(1 << 30, 1000, 9999, True), (1 << 20, 5000, 9999, False), (1 << 30, 999, 9999, False), (1 << 30, 0, 0, True)],
    ids=["enough", "no space", "no inodes", "inodes not counted"],
)  # fmt: skip
def test_too_little_space_or_inodes_fails(root, monkeypatch, blocks, inodes, files, ok):
    free = {"f_bavail": blocks, "f_frsize": 1, "f_favail": inodes, "f_files": files}
    status = types.SimpleNamespace(**free, f_flag=0)
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    check = looked()["cache space"]
    assert (check.ok, "jitkern cache prune" in check.remedy) == (ok, not ok)


def test_a_cache_over_its_limit_is_a_warning(root):
    entry = root / "v1/cpu-x86_64-torch2.13.0" / f"x-{'0' * 16}"
    entry.mkdir(parents=True)
    (entry / "out.so").write_bytes(bytes(2 << 20))
    assert "jitkern cache prune" in looked(max_size=1 << 20)["cache size"].remedy
    assert looked(max_size=0)["cache size"].value == "2 MiB, without a limit"
    assert looked()["cache size"].remedy == ""


def test_without_a_lock_directory_processes_may_compile_twice(root, tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setattr(tempfile, "tempdir", str(file))
    check = looked(runtime_dir=file)["cache locks"]
    assert check.ok and "no directory" in check.value and "compile the same" in check.value
    assert "XDG_RUNTIME_DIR" in check.remedy


def test_locks_are_tried_with_a_second_holder(root, tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    assert looked(runtime_dir=private)["cache locks"].value.startswith("one process at a time")
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    assert "do not exclude other processes" in looked(runtime_dir=private)["cache locks"].value
    assert list((private / "jitkern").iterdir()) == []
    monkeypatch.setattr(fcntl, "flock", refuse)
    assert "locks are unavailable" in looked(runtime_dir=private)["cache locks"].value


def test_keys_are_no_good_without_the_package_that_checks_them(cli, root, monkeypatch):
    def version(name):
        if name == "cryptography":
            raise importlib.metadata.PackageNotFoundError(name)
        return "1.0"

    monkeypatch.setattr("jitkern.cli.doctor.version", version)
    remedy = 'pip install "jitkern[sign]"'
    check = told(cli)["cryptography"]
    assert (check.ok, check.value) == (True, f"missing: needed only for signatures: {remedy}")
    for settings in ({"trusted_keys": (KEY,)}, {"signed": (root,)}):
        with config.using(**settings):
            check = told(cli)["cryptography"]
        assert (check.ok, check.value, check.remedy) == (False, "missing", remedy)


def test_a_named_layer_is_counted_or_fails(root, tmp_path):
    layer = tmp_path / "layer"
    assert not looked(system_cache=(layer,))["layer"].ok
    (layer / f"v1/cpu-x86_64-torch2.13.0/x-{1:016x}").mkdir(parents=True)
    layer.chmod(0o755)
    check = looked(system_cache=(layer,), origins={"system_cache": "environment"})["layer"]
    assert (check.ok, check.value, check.origin) == (True, f"{layer}, 1 entry", "environment")
    layer.chmod(0o777)
    check = looked(system_cache=(layer,))["layer"]
    assert not check.ok and "not used" in check.value and "`trusted`" in check.remedy
    assert looked(system_cache=(layer,), trusted=(layer,))["layer"].ok
    assert "signed entries" in looked(system_cache=(layer,), trusted_keys=(KEY,))["layer"].value


def test_an_installed_layer_that_is_not_used_is_a_warning(root, tmp_path, monkeypatch):
    layer = tmp_path / "layer"
    layer.mkdir()
    layer.chmod(0o777)
    monkeypatch.setattr(trust, "installed_layers", lambda: (layer,))
    check = looked()["layer"]
    assert check.ok and "not used" in check.value and check.origin == "installed"


@pytest.mark.parametrize(
    ("error", "use", "expected"),
    [
        (RuntimeError("Symlink loop"), "", (False, "cannot be examined: Symlink loop", "mend it")),
        (ModuleNotFoundError("x"), "", (False, "missing", "mend it")),
        (ModuleNotFoundError("x"), "for y", (True, "missing: needed only for y: mend it", "")),
        (SettingError("it is wrong: right it"), "", (False, "it is wrong", "mend it")),
        (Problem("slow", ok=True), "for y", (True, "slow", "mend it")),
        (Problem("torn", "sew it"), "", (False, "torn", "sew it")),
    ],
)
def test_what_a_row_raises_becomes_a_line_with_a_remedy(error, use, expected):
    def ask():
        raise error

    if isinstance(error, SettingError):
        assert Look("thing", ask).check().remedy == "right it"
    check = Look("thing", ask, "mend it", use, "somewhere").check()
    assert (check.name, check.origin) == ("thing", "somewhere")
    assert (check.ok, check.value, check.remedy) == expected


@pytest.mark.long
def test_doctor_says_what_serves_calls(cli, monkeypatch, tmp_path):
    def launch_runtime():
        report = json.loads(cli("doctor", "--json")[1].splitlines()[-1])
        return by_name(report["checks"])["launch runtime"]

    assert "it is compiled at the first call" in launch_runtime().value
    with config.using(cc="/nonexistent/cc"):
        found = launch_runtime()
        assert found.ok and "Python serves calls" in found.value and "bundle" in found.remedy
    jit.ensure(binding.variant(), Target.current("cpu"))
    with config.using(cc="/nonexistent/cc"):
        assert launch_runtime().value == "in the cache: C serves calls"
