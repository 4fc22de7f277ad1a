"""What is loaded is what was verified, whoever may rename or write the directories around it."""

import ctypes
import os
import subprocess

import pytest

from jitkern import jit
from jitkern.cache.store import Cache
from jitkern.errors import LoadError
from jitkern.files import trust
from jitkern.loading import LOADED, loader
from jitkern.loading.loader import load
from jitkern.source.kinds import Cpp, Variant
from jitkern.target import Target

TEXT = 'extern "C" {{ int value() {{ return {0}; }} void scale(float* out) {{ *out = {0}; }} }}\n'


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "scale"
    folder.mkdir()
    (folder / "scale.cpp").write_text(TEXT.format(1))
    return Cpp("scale.cpp", folder=str(folder))


@pytest.fixture
def variant(source):
    return Variant("test::scale", source, "scale")


@pytest.fixture
def entry(variant):
    jit.ensure(variant, Target.current("cpu"))
    return jit.ensure(variant, Target.current("cpu"))


@pytest.fixture
def evil(tmp_path):
    library = tmp_path / "evil.so"
    (tmp_path / "evil.cpp").write_text(TEXT.format(2))
    subprocess.run(["c++", "-shared", "-fPIC", "-o", library, tmp_path / "evil.cpp"], check=True)
    return library


def copy_with(entry, evil, there):
    """A cache like that of an entry, with other code in it."""
    there.mkdir(parents=True)
    for file in entry.path.iterdir():
        name = evil if file.suffix == ".so" else file
        (there / file.name).write_bytes(name.read_bytes())
    return there


def value_of(path):
    return ctypes.CDLL(path).value()


@pytest.mark.parametrize("level", [0, 1, 2, 3, 4])
def test_what_is_put_in_place_of_a_directory_above_is_not_loaded(
    level, entry, evil, tmp_path_factory
):
    """Level 0 is the entry itself, 4 the directory in which the root lies."""
    outside = tmp_path_factory.mktemp("outside")
    place = (entry.path, *entry.path.parents)[level]
    copy_with(entry, evil, outside / "other" / entry.path.relative_to(place))
    with entry.loadable() as path:
        place.rename(outside / "moved")
        (outside / "other").rename(place)
        try:
            assert (entry.path / entry.manifest.meta["artifact"]).read_bytes() != b""
            assert value_of(path) == 1
        finally:
            place.rename(outside / "other")
            (outside / "moved").rename(place)


def test_what_was_replaced_since_it_was_verified_is_refused(entry, evil, source, tmp_path):
    copy_with(entry, evil, tmp_path / "other")
    entry.path.rename(tmp_path / "moved")
    (tmp_path / "other").rename(entry.path)
    with pytest.raises(LoadError, match="replaced after it was verified"):
        load(source, entry)


def test_a_hard_link_to_what_was_verified_is_not_it(entry, source, tmp_path):
    entry.path.rename(tmp_path / "moved")
    entry.path.mkdir()
    for file in (tmp_path / "moved").iterdir():
        os.link(file, entry.path / file.name)
    with pytest.raises(LoadError, match="replaced after it was verified"):
        load(source, entry)


def test_a_changed_file_is_refused(entry, evil, source):
    artifact = entry.path / entry.manifest.meta["artifact"]
    before = artifact.stat()
    artifact.write_bytes(evil.read_bytes()[: before.st_size])
    os.utime(artifact, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(LoadError, match="replaced after it was verified"):
        load(source, entry)


def test_what_was_published_just_now_is_verified_too(variant, evil, monkeypatch):
    entry = jit.ensure(variant, Target.current("cpu"))
    (entry.path / entry.manifest.meta["artifact"]).write_bytes(evil.read_bytes())
    with pytest.raises(LoadError):
        load(variant.source, entry)


def test_a_call_whose_entry_is_replaced_meanwhile_looks_again(variant, entry, monkeypatch):
    target = Target.current("cpu")
    LOADED.pop(f"{entry.manifest.digest} ", None)
    real, stale = loader.load, []

    def load_after_a_change(source, found, op):
        if not stale:
            stale.append(found)
            artifact = found.path / found.manifest.meta["artifact"]
            artifact.touch()
        return real(source, found, op)

    monkeypatch.setattr("jitkern.jit.load.load", load_after_a_change)
    assert jit.loaded(variant, target).address


@pytest.mark.parametrize("level", ["v1", "target"])
@pytest.mark.parametrize("how", ["mode", "owner"])
def test_a_layer_that_others_may_write_is_not_used(level, how, entry, cache_dir, tmp_path, caplog):
    if how == "owner" and os.geteuid() != 0:
        pytest.skip("needs root to give a directory away")
    place = {"v1": entry.path.parents[1], "target": entry.path.parent}[level]
    cache = Cache(tmp_path / "user", (cache_dir,))
    found = (entry.path.parent.name, entry.path.name)
    assert cache.look_up(*found).entry
    if how == "mode":
        place.chmod(0o775)
    else:
        os.chown(place, 12345, 12345)
    assert cache.look_up(*found).entry is None
    assert cache.look_up(*found).reason == "unreadable"
    assert caplog.text.count(f"{place} ") == 1
    assert cache.look_up(*found).entry is None
    with_trust = Cache(tmp_path / "user", (cache_dir,), rules=trust.Trust(roots=(cache_dir,)))
    assert with_trust.look_up(*found).entry


@pytest.mark.parametrize("level", ["v1", "target"])
def test_a_folder_of_the_user_root_that_others_may_write_closes(level, variant, entry):
    place = {"v1": entry.path.parents[1], "target": entry.path.parent}[level]
    place.chmod(0o775)
    cache, target = jit.open_cache(), Target.current("cpu")
    assert cache.find(jit.key_of(variant, target)) is None
    jit.ensure(variant, target)
    assert cache.find(jit.key_of(variant, target))


def test_two_libraries_of_one_name_are_two(tmp_path):
    """dlopen takes libraries of one name for one, and numbers of descriptors come back."""
    paths = set()
    for folder in ("a", "b", "c"):
        (tmp_path / folder).mkdir()
        with trust.opened(tmp_path / folder) as directory:
            paths.add(trust.path_in(directory, tmp_path / folder, "lib.so"))
    assert len(paths) == 3


def test_the_loader_knows_a_library_by_its_path_in_the_cache(entry):
    """Other processes, such as the addr2line of a stack trace, open the path that it tells."""
    with entry.loadable() as path:
        function = ctypes.CDLL(path).value
    described = (ctypes.c_char_p * 4)()  # a `Dl_info`: the file's name comes first
    assert ctypes.CDLL(None).dladdr(function, described)
    assert described[0] == os.fsencode(entry.path / entry.manifest.meta["artifact"])
    assert function() == 1


def test_without_descriptors_in_proc_the_path_is_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(trust, "DESCRIPTORS", str(tmp_path / "none"))
    with trust.opened(tmp_path) as directory:
        assert trust.path_in(directory, tmp_path, "lib.so") == str(tmp_path / "lib.so")
