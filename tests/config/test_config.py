import ast
import asyncio
import os
import pwd
import re
import threading
from pathlib import Path

import pytest

import jitkern
from jitkern import cli, config, jit, testing
from jitkern.config import Config, background
from jitkern.errors import SettingError


def test_defaults():
    c = Config.from_env({"HOME": "/home/u"})
    assert (c.compile, c.fallback, c.compiler, c.verify, c.fsync, c.prefer) == (
        "auto",
        "",
        "any",
        "always",
        True,
        "",
    )
    assert c.cache_dir.is_absolute() and c.cache_dir_origin == "default"


@pytest.mark.parametrize(
    ("name", "value", "field", "expected"),
    [
        ("JITKERN_COMPILE", "never", "compile", "never"),
        ("JITKERN_FALLBACK", "raise", "fallback", "raise"),
        ("JITKERN_COMPILER", "exact", "compiler", "exact"),
        ("JITKERN_PREFER", "triton", "prefer", "triton"),
        ("JITKERN_VERIFY", "size", "verify", "size"),
        ("JITKERN_FSYNC", "0", "fsync", False),
        ("JITKERN_JOBS", "3", "jobs", 3),
        ("JITKERN_LOCK_TIMEOUT", "2.5", "lock_timeout", 2.5),
        ("JITKERN_SYSTEM_CACHE", f"/a{os.pathsep}/b", "system_cache", (Path("/a"), Path("/b"))),
        ("JITKERN_CACHE_DIR", "/c", "cache_dir", Path("/c")),
    ],
)
def test_variable_sets_field(name, value, field, expected):
    assert getattr(Config.from_env({name: value}), field) == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("JITKERN_COMPILE", "sometimes"),
        ("JITKERN_JOBS", "many"),
        ("JITKERN_JOBS", "-1"),
        ("JITKERN_VERIFY", "no"),
        ("JITKERN_LOCK_TIMEOUT", "nan"),
        ("JITKERN_REMOTE", "https://[::1"),
        ("JITKERN_REMOTE", "s3://kernels]/main"),
        ("JITKERN_REMOTE", "https://kernels.example\u2100/main"),
    ],
)
def test_bad_value_names_the_variable_and_what_it_takes(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name}=`{value}` is not usable: expected")):
        Config.from_env({name: value})


def test_empty_variable_is_unset():
    assert Config.from_env({"JITKERN_COMPILE": "", "JITKERN_JOBS": ""}).compile == "auto"


def test_a_list_is_as_good_as_a_tuple(tmp_path):
    with config.using(system_cache=[tmp_path], trusted=[tmp_path]):
        assert jit.open_cache().layers[:1] == (tmp_path,)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (
            "compile",
            "nevr",
            "compile=`nevr` is not usable: expected one of auto, never, background",
        ),
        ("verify", "sometimes", "expected one of always, size"),
        ("verify", None, "expected one of always, size"),
        ("prefer", "cuda", "expected one of nvrtc, cc, triton, cutile, cute, extension"),
        ("fallback", "no", "expected one of reference, raise"),
        ("compiler", "gcc", "expected one of any, exact"),
        ("log", "loud", "expected one of warning, info, debug"),
        ("lock_timeout", "soon", "expected a number from 0 up"),
        ("jobs", 2.5, "expected a whole number from 0 up"),
        ("jobs", True, "expected a whole number from 0 up"),
        ("fsync", "yes", "expected one of 1, 0"),
        ("max_size", -1, "expected something like `10 GiB`"),
        ("max_age", "long", "expected something like `60 d`"),
        ("cache_dir", None, "expected a path"),
        ("record", 3, "expected a path"),
        ("system_cache", 3, "expected a list of paths"),
        ("trusted_keys", ["abc"], "is not a public key"),
    ],
)
def test_using_refuses_what_the_environment_would(name, value, says):
    before = config.current()
    with pytest.raises(ValueError, match=re.escape(says)), config.using(**{name: value}):
        pass
    with pytest.raises(ValueError, match=re.escape(says)):
        Config(**{name: value})
    with pytest.raises(TypeError, match="^there is no setting typo$"), config.using(typo=1):
        pass
    assert config.current() is before


def test_a_misspelt_setting_is_told_with_the_one_that_is_meant():
    with pytest.raises(TypeError, match="no setting complie; did you mean compile"):
        jitkern.using(complie="never").__enter__()


def test_an_error_of_using_names_it_and_doctor_is_told_of_it():
    with config.using(jobs=3) as inside:
        assert inside.origins["jobs"] == "using"
        with pytest.raises(ValueError, match="^using: jobs=`many` is not usable"):
            config.using(jobs="many").__enter__()
        with config.using(verify="size") as inner:
            assert inner.origins["jobs"] == "using"


def test_settings_are_frozen():
    with pytest.raises(AttributeError, match="jobs"):
        config.current().jobs = 3


def test_a_variable_may_prefer_a_kind_that_is_declared_later(monkeypatch):
    settings = Config.from_env({"JITKERN_PREFER": "formula"})
    testing.set_settings(monkeypatch, settings)
    says = re.escape("JITKERN_PREFER=`formula` is not usable: expected one of nvrtc, cc")
    with pytest.raises(ValueError, match=says):
        config.preferred()
    with pytest.raises(ValueError, match=says), config.using(jobs=3):
        config.preferred()
    monkeypatch.setitem(config.KINDS, "formula", object)
    assert config.preferred() == "formula"


@pytest.mark.long
def test_a_call_tells_of_a_misspelt_preference(run_python):
    done = run_python(
        "import torch, jitkern.ops\njitkern.ops.vec_add(torch.ones(3), torch.ones(3))\n",
        JITKERN_PREFER="ncc",
    )
    assert "SettingError: JITKERN_PREFER=`ncc` is not usable: expected one of" in done.stderr


def test_using_takes_what_the_environment_does():
    values = {"cache_dir": "/c", "max_size": "1 GiB", "max_age": "2 d", "jobs": "3", "fsync": "0"}
    with config.using(**values, system_cache=["/a:b"], record="~/calls", lock_timeout=1) as now:
        assert (now.cache_dir, now.system_cache) == (Path("/c"), (Path("/a:b"),))
        assert (now.max_size, now.max_age) == (1 << 30, 2 * 86400)
        assert (now.jobs, now.fsync, now.lock_timeout) == (3, False, 1.0)
        assert now.record == Path("~/calls").expanduser()


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("JITKERN_CACHE_DIR", "~no-such-user/x"),
        ("JITKERN_RECORD", "~no-such-user"),
        ("JITKERN_SYSTEM_CACHE", "/a:~no-such-user/x"),
        ("CUDA_HOME", "~no-such-user/cuda"),
    ],
)
def test_a_path_of_a_user_who_does_not_exist_is_refused(variable, text):
    says = f"{variable}=.*no-such-user.* is not usable: there is no user `no-such-user`"
    with pytest.raises(SettingError, match=says):
        Config.from_env({variable: text})


def test_the_home_of_any_user_is_found_in_paths_of_every_origin(monkeypatch, tmp_path, capsys):
    root = Path(pwd.getpwnam("root").pw_dir)
    found = Config.from_env({"JITKERN_CACHE_DIR": "~root/x", "JITKERN_SYSTEM_CACHE": "~root:/a"})
    assert (found.cache_dir, found.system_cache) == (root / "x", (root, Path("/a")))
    file = tmp_path / "config.toml"
    file.write_text('cache_dir = "~root"\ntrusted = ["~/t", "./~x"]\n')
    monkeypatch.setenv("HOME", "/home/me")
    found = Config.from_env({}, [file])
    assert (found.cache_dir, found.trusted) == (root, (Path("/home/me/t"), Path("~x").absolute()))
    file.write_text('sign_key = "~no-such-user/k"\n')
    with pytest.raises(SettingError, match=f"{file}: sign_key=.*: there is no user"):
        Config.from_env({}, [file])
    with pytest.raises(SettingError, match="cache_dir=.*: there is no user"):
        Config(cache_dir="~no-such-user")
    assert cli.main(["--cache-dir", "~no-such-user/x", "cache", "dir"]) == 2
    assert "--cache-dir: cache_dir=`~no-such-user/x` is not usable" in capsys.readouterr().err
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(SettingError, match="there is no home of this user"):
        Config(cache_dir="~/x")


def test_using_counts_in_its_own_thread_alone():
    inside, done = threading.Event(), threading.Event()
    seen = []

    def block(**settings):
        with config.using(**settings):
            inside.set()
            done.wait()
            seen.append(config.current().compile)

    thread = threading.Thread(target=block, kwargs={"compile": "never"})
    thread.start()
    inside.wait()
    with config.using(lock_timeout=5.0):
        assert config.current().compile == "auto"
        done.set()
        thread.join()
        assert (config.current().compile, config.current().lock_timeout) == ("auto", 5.0)
    assert seen == ["never"]
    assert (config.current().compile, config.current().lock_timeout) == ("auto", 1800.0)


def test_using_counts_in_its_own_task_alone():
    seen = []

    async def block(wanted, wait):
        with config.using(compile=wanted):
            await asyncio.sleep(wait)
            seen.append((wanted, config.current().compile))

    async def both():
        await asyncio.gather(block("never", 0.02), block("background", 0.01))

    asyncio.run(both())
    assert sorted(seen) == [("background", "background"), ("never", "never")]
    assert config.current().compile == "auto"


def test_a_build_beside_the_calls_has_the_settings_of_its_call(tmp_path):
    seen = []
    with config.using(cache_dir=tmp_path):
        assert background.BUILDS.later(lambda: seen.append(config.current().cache_dir))
    background.settle()
    assert seen == [tmp_path]


def test_a_fork_has_no_blocks_of_other_threads(run_python):
    done = run_python(
        "import os, threading\n"
        "from jitkern import config\n"
        "inside, done = threading.Event(), threading.Event()\n"
        "def block():\n"
        "    with config.using(prefer='cc'): inside.set(); done.wait()\n"
        "thread = threading.Thread(target=block); thread.start(); inside.wait()\n"
        "print(config.c_may_serve(), flush=True)\n"
        "if not os.fork():\n"
        "    print(config.c_may_serve(), flush=True); os._exit(0)\n"
        "os.wait(); done.set(); thread.join()\n"
        "print(config.c_may_serve())\n"
    )
    assert done.stdout == "False\nTrue\nTrue\n", done.stderr


def test_using_is_undone():
    before = config.current()
    with config.using(compile="never") as inside:
        assert config.current() is inside
        assert inside.compile == "never"
    assert config.current() is before


def test_the_environment_is_read_anew_where_nobody_named_another(monkeypatch):
    testing.set_settings(monkeypatch, config.current())
    monkeypatch.setenv("JITKERN_COMPILE", "never")
    monkeypatch.setenv("CPATH", "/changed")
    monkeypatch.setenv("CUDA_HOME", "/toolkit")
    before = config.current().cxx
    monkeypatch.setenv("CXX", "g++-13")
    with config.using(cxx="clang++"):
        config.renew(["CPATH"])
        inside = config.current()
        assert (inside.cxx, inside.cuda_home) == ("clang++", Path("/toolkit"))
    assert config.current().cxx == before, "`using` is undone"
    config.renew(["CPATH"])
    renewed = config.current()
    assert (renewed.cxx, renewed.environment["CPATH"]) == ("g++-13", "/changed")
    assert renewed.compile == "auto", "settings are read once"
    monkeypatch.setenv("UNRELATED", "changed")
    config.renew(["CPATH"])
    assert config.current() is renewed
    monkeypatch.delenv("CPATH")
    config.renew(["CPATH"])
    assert not {"CPATH", "UNRELATED"} & config.current().environment.keys()
    with config.using(environment={"PATH": "/bin"}) as given:
        config.renew()
        assert config.current() is given


def test_build_environment_is_scrubbed():
    c = Config.from_env(
        {
            "PATH": "/bin",
            "CFLAGS": "-O0",
            "CPATH": "/x",
            "NVCC_APPEND_FLAGS": "-g",
            "TRITON_DEBUG": "1",
            "MINE": "2",
        }
    )
    assert set(c.build_environment()) == {"PATH", "LC_ALL"}
    assert c.build_environment(("MINE",))["MINE"] == "2"


OF_THE_PROCESS = {  # an import of a kernel's file sees the process that asks for it
    "compilers/triton/build.py", "compilers/triton/importing.py", "source/import_facts.py",
}  # fmt: skip


def test_no_other_file_reads_the_environment():
    root = Path(jitkern.__file__).parent
    for path in [*root.rglob("*.py"), *(root.parent / "cache_tools").rglob("*.py")]:
        read = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        }
        may = (
            path.name == "settings.py"
            or str(path.relative_to(root.parent)).removeprefix("jitkern/") in OF_THE_PROCESS
        )
        assert may or not read & {"environ", "getenv"}, path


def test_a_compiler_is_a_command():
    settings = Config.from_env({"CC": " ", "CXX": "ccache g++"}, [])
    assert (settings.cc, settings.cxx) == ("cc", "ccache g++")
    with pytest.raises(SettingError, match=r"cxx=`g\+\+ 'x` is not usable: expected a command"):
        Config.from_env({"CXX": "g++ 'x"}, [])
