import os
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
    assert found.origins["JITKERN_JOBS"] == "environment"
    assert found.origins["JITKERN_VERIFY"] == found.cache_dir_origin == str(path)


def test_the_users_file_wins_over_the_systems(write):
    files = [write('verify = "size"\njobs = 1\n', "system"), write("jobs = 2\n", "user")]
    found = Config.from_env({}, files)
    assert (found.verify, found.jobs) == ("size", 2)


def test_the_users_file_is_where_xdg_puts_it(tmp_path, monkeypatch):
    (tmp_path / "jitkern").mkdir()
    (tmp_path / "jitkern" / "config.toml").write_text("jobs = 7\n")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(config, "SYSTEM_FILE", tmp_path / "none")
    assert Config.from_env().jobs == 7


def test_trust_comes_from_files_and_never_from_the_environment(write):
    path = write(f'trusted = ["/t"]\nsigned = ["/s"]\ntrusted_keys = ["{KEY} ci: main"]\n')
    found = Config.from_env({"JITKERN_TRUSTED": "/evil", "JITKERN_TRUSTED_KEYS": "x"}, [path])
    assert (found.trusted, found.signed) == ((Path("/t"),), (Path("/s"),))
    assert found.trusted_keys == ("A" * 43 + "=",)
    assert Config.from_env({"JITKERN_TRUSTED": "/evil"}, []).trusted == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("jobs = [1]", "neither text, a number nor a list"),
        ("jbos = 1", "`jbos` is not a setting; there are: cache_dir"),
        ('JOBS = "1"', "`JOBS` is not a setting"),
        ("jobs = ", "config.toml: "),
        ('max_size = "much"', "expected something like `10 GiB`"),
        ('max_age = "long"', "expected something like `60 d`"),
        ('trusted_keys = ["abc"]', "is not a public key"),
        ("verify = 1", "expected one of always, size"),
    ],
)
def test_what_it_cannot_use_is_named(write, text, says):
    with pytest.raises(ValueError, match=says):
        Config.from_env({}, [write(text)])


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
    assert config._default_cache_dir().name == f"jitkern-cache-{os.geteuid()}"


@pytest.mark.parametrize("base", [None, "", "/elsewhere", "relative"])
def test_the_default_cache_lies_where_platformdirs_has_it(base, monkeypatch, tmp_path):
    import platformdirs

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if base is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", base)
    found = config._default_cache_dir()
    assert found == Path(base if base == "/elsewhere" else tmp_path / ".cache", "jitkern")
    if base != "relative":  # releases of platformdirs differ in that
        assert found == platformdirs.user_cache_path("jitkern", appauthor=False)
