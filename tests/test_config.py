import ast
import os
from pathlib import Path

import pytest

import jitkern
from jitkern import config, jit
from jitkern.config import Config


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
    ],
)
def test_bad_value_names_the_variable_and_what_it_takes(name, value):
    with pytest.raises(ValueError, match=rf"{name}=`{value}` is not usable: expected"):
        Config.from_env({name: value})


def test_empty_variable_is_unset():
    assert Config.from_env({"JITKERN_COMPILE": "", "JITKERN_JOBS": ""}).compile == "auto"


def test_a_list_is_as_good_as_a_tuple(tmp_path):
    with config.using(system_cache=[tmp_path], trusted=[tmp_path]):
        assert jit.open_cache().layers[:1] == (tmp_path,)


def test_using_is_undone():
    before = config.current()
    with config.using(compile="never") as inside:
        assert config.current() is inside
        assert inside.compile == "never"
    assert config.current() is before


def test_the_environment_is_read_anew_where_nobody_named_another(monkeypatch):
    monkeypatch.setattr(config, "_current", config.current())
    monkeypatch.setenv("JITKERN_COMPILE", "never")
    monkeypatch.setenv("CPATH", "/changed")
    monkeypatch.setenv("CUDA_HOME", "/toolkit")
    monkeypatch.setenv("CXX", "g++-13")
    with config.using(cxx="clang++"):
        config.renew(["CPATH"])
        inside = config.current()
        assert (inside.cxx, inside.cuda_home) == ("clang++", Path("/toolkit"))
    assert config.current().cxx == "c++", "`using` is undone"
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


def test_no_other_file_reads_the_environment():
    root = Path(jitkern.__file__).parent
    for path in [*root.rglob("*.py"), *(root.parent / "cache_tools").rglob("*.py")]:
        read = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute)
        }
        assert path.name == "config.py" or not read & {"environ", "getenv"}, path
