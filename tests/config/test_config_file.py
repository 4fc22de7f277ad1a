import os
import re
from pathlib import Path

import pytest

from jitkern import config
from jitkern.config import Config

KEY = "ed25519 " + "A" * 43 + "="


@pytest.fixture
def write(tmp_path):
    def write(text, name="config.toml", mode=0o644):
        path = tmp_path / name
        path.write_text(text)
        path.chmod(mode)
        return path

    return write


def test_a_settings_file_sets_what_the_environment_does_not(write):
    path = write(
        'cache_dir = "/c"\nsystem_cache = ["/a", "/b"]\nmax_size = "2 GiB"\nmax_age = "7d"\n'
        'fsync = false\njobs = 3\nverify = "size"\n'
    )
    found = Config.from_env({"JITKERN_JOBS": "5"}, [path])
    assert (found.cache_dir, found.system_cache) == (Path("/c"), (Path("/a"), Path("/b")))
    assert (found.max_size, found.max_age, found.fsync) == (2 << 30, 7 * 86400, False)
    assert (found.jobs, found.verify) == (5, "size")
    assert found.origins["jobs"] == "environment"
    assert found.origins["verify"] == found.cache_dir_origin == str(path)


def test_the_users_file_wins_over_the_systems(write):
    files = [write('verify = "size"\njobs = 1\n', "system"), write("jobs = 2\n", "user")]
    found = Config.from_env({}, files)
    assert (found.verify, found.jobs) == ("size", 2)


def test_the_users_file_is_where_xdg_puts_it(tmp_path, monkeypatch):
    (tmp_path / "jitkern").mkdir()
    (tmp_path / "jitkern" / "config.toml").write_text("jobs = 7\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr("jitkern.config.settings.SYSTEM_FILE", tmp_path / "none")
    assert Config.from_env().jobs == 7


def test_trust_comes_from_files_and_never_from_the_environment(write):
    path = write(f'trusted = ["/t"]\nsigned = ["/s"]\ntrusted_keys = ["{KEY} ci: main"]\n')
    found = Config.from_env({"JITKERN_TRUSTED": "/evil", "JITKERN_TRUSTED_KEYS": "x"}, [path])
    assert (found.trusted, found.signed) == ((Path("/t"),), (Path("/s"),))
    assert found.trusted_keys == ("A" * 43 + "=",)
    assert Config.from_env({"JITKERN_TRUSTED": "/evil"}, []).trusted == ()


def test_a_path_with_a_colon_is_one_path(write):
    path = write('system_cache = ["/mnt/a:b/kernels"]\ntrusted = ["/opt/x:y"]\nsigned = "/s:t"\n')
    found = Config.from_env({}, [path])
    assert found.system_cache == (Path("/mnt/a:b/kernels"),)
    assert (found.trusted, found.signed) == ((Path("/opt/x:y"),), (Path("/s:t"),))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("jobs = [1]", "jobs=[1] is not usable: expected a whole number from 0 up"),
        ("jobs = 2.5", "jobs=`2.5` is not usable: expected a whole number from 0 up"),
        ("jbos = 1", "`jbos` is not a setting: expected one of cache_dir"),
        ("jbos = 1", "; did you mean jobs?"),
        ('JOBS = "1"', "`JOBS` is not a setting"),
        ("jobs = ", ""),
        ('max_size = "much"', "max_size=`much` is not usable: expected something like `10 GiB`"),
        ('max_age = "long"', "max_age=`long` is not usable: expected something like `60 d`"),
        ("lock_timeout = true", "lock_timeout=`True` is not usable: expected a number from 0 up"),
        ('trusted_keys = ["abc"]', "is not a public key"),
        ('trusted_keys = "abc"', "expected a list of public keys"),
        ("trusted_keys = [1]", "expected a list of public keys"),
        ("trusted = [1]", "trusted=[1] is not usable: expected a path"),
        ("verify = 1", "verify=`1` is not usable: expected one of always, size"),
        ("cache_dir = 3", "cache_dir=`3` is not usable: expected a path"),
    ],
)
def test_what_it_cannot_use_is_told_with_the_file_and_the_key(write, text, says):
    path = write(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}: ") + ".*" + re.escape(says)) as e:
        Config.from_env({}, [path])
    assert "JITKERN_" not in str(e.value)


@pytest.mark.parametrize("base", [".", "", "relative"])
def test_a_relative_directory_of_xdg_is_ignored(base, tmp_path, monkeypatch):
    for folder in (".", "relative"):
        (tmp_path / folder / "jitkern").mkdir(parents=True)
        (tmp_path / folder / "jitkern" / "config.toml").write_text("jobs = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jitkern.config.settings.SYSTEM_FILE", tmp_path / "none")
    monkeypatch.setenv("HOME", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CONFIG_HOME", base)
    monkeypatch.setenv("XDG_RUNTIME_DIR", base)
    found = Config.from_env()
    assert (found.jobs, found.runtime_dir) == (0, None)


def test_a_file_that_others_can_write_is_refused(write):
    with pytest.raises(ValueError, match="another user could have written it"):
        Config.from_env({}, [write("jobs = 1", mode=0o666)])


def test_a_missing_file_is_no_error(tmp_path):
    assert Config.from_env({}, [tmp_path / "none"]).jobs == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1024", 1024),
        ("2k", 2048),
        ("1.5 MiB", 3 << 19),
        ("10GB", 10 << 30),
        ("1 tib", 1 << 40),
    ],
)
def test_sizes(text, size):
    assert config.size_of(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("5min", 300), ("12 h", 43200), ("30d", 2592000), ("1w", 604800)],
)
def test_durations(text, seconds):
    assert config.duration_of(text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "1 parsec", "1e9", "nan"])
def test_what_is_no_quantity(text):
    for parse in (config.size_of, config.duration_of):
        with pytest.raises(ValueError, match=r".*"):
            parse(text)


def test_a_user_without_a_home_has_a_cache_under_tmp(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert Config().cache_dir.name == f"jitkern-cache-{os.geteuid()}"


@pytest.mark.parametrize("base", [None, "", "/elsewhere", "relative"])
def test_the_default_cache_lies_where_platformdirs_has_it(base, monkeypatch, tmp_path):
    import platformdirs

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if base is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", base)
    found = Config().cache_dir
    assert found == Path(base if base == "/elsewhere" else tmp_path / ".cache", "jitkern")
    if base != "relative":  # releases of platformdirs differ in that
        assert found == platformdirs.user_cache_path("jitkern", appauthor=False)
