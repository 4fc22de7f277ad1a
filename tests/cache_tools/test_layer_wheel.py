"""Wheels of prebuilt kernels: made from a cache, installed by pip, found as a layer."""

import base64
import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import venv
import zipfile

import pytest
from helpers import REPOSITORY, published

from jitkern._version import __version__
from jitkern.cache.store import Cache
from jitkern.cache_tools import chosen, signing
from jitkern.cache_tools.bundle import BundleError
from jitkern.cache_tools.listing import EntryFilter
from jitkern.cache_tools.wheel import pack_wheel
from jitkern.target import Target

LOOK = """
import json, sys
from pathlib import Path
{before}
from jitkern.files import trust
from jitkern.cache.store import Cache
layers = trust.installed_layers()
cache = Cache(Path({user!r}), layers)
found = [cache.look_up(*place) for place in {places!r}]
print(json.dumps([list(map(str, layers)), [str(f.entry.path) if f.entry else None for f in found]]))
"""


@pytest.fixture
def publish(variant):
    return lambda cache, target: published(cache, variant, target)[0]


@pytest.fixture
def device():
    return Target("cuda", "sm_90", "130", "2.13.0")


@pytest.fixture
def host():
    return Target("cpu", "x86_64", "", "2.13.0", "linux_x86_64")


@pytest.fixture
def cache(tmp_path):
    return Cache(tmp_path / "from", fsync=False)


def made(cache, directory, name="acme-kernels", version="1.2.0", platform=""):
    whole = chosen(cache, EntryFilter())
    return pack_wheel(cache, whole, directory, name=name, version=version, platform=platform)


def names(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def read(wheel, ending):
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith(ending)))


def pip(*arguments, umask=-1):
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q", *arguments],
        check=True, umask=umask, capture_output=True, env={**os.environ, "PIP_CONFIG_FILE": os.devnull},
    )  # fmt: skip


def look(python, tmp_path, keys, before=""):
    """The layers and entries that another Python finds."""
    places = [(key.target, key.name, key.digest) for key in keys]
    code = LOOK.format(before=before, user=str(tmp_path / "user"), places=places)
    done = subprocess.run(
        [python, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path,
        env={"PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    return json.loads(done.stdout)


# --- what a wheel is


@pytest.mark.usefixtures("signing_package")
def test_it_holds_the_entries_as_a_layer(cache, tmp_path, publish, device):
    key = publish(cache, device)
    signing.keygen(tmp_path / "key")
    signing.sign(cache, chosen(cache, EntryFilter()), tmp_path / "key")
    wheel = made(cache, tmp_path / "dist")
    place = f"jitkern_layers/acme_kernels/v1/{key.target}/{key.name}"
    assert wheel == tmp_path / "dist" / "acme_kernels-1.2.0-py3-none-any.whl"
    assert names(wheel) == [
        f"{place}/manifest.sig", f"{place}/manifest.json", f"{place}/out.so",
        "acme_kernels-1.2.0.dist-info/METADATA", "acme_kernels-1.2.0.dist-info/WHEEL",
        "acme_kernels-1.2.0.dist-info/RECORD",
    ]  # fmt: skip
    for part in ("manifest.sig", "manifest.json", "out.so"):
        assert read(wheel, part) == (cache.root / "v1" / key.target / key.name / part).read_bytes()


def test_its_metadata_says_what_pip_needs(cache, tmp_path, publish, host):
    publish(cache, host)
    wheel = made(cache, tmp_path, name="Acme.Kernels")
    metadata = read(wheel, "METADATA").decode().splitlines()
    assert {"Name: acme-kernels", "Version: 1.2.0", "Requires-Dist: jitkern"} <= {*metadata}
    assert any(line.startswith("Summary: ") for line in metadata)
    lines = read(wheel, "WHEEL").decode().splitlines()
    assert {"Root-Is-Purelib: false", "Tag: py3-none-linux_x86_64"} <= {*lines}


def test_its_record_has_every_file_with_its_hash(cache, tmp_path, publish, device):
    publish(cache, device)
    wheel = made(cache, tmp_path)
    rows = list(csv.reader(io.StringIO(read(wheel, "RECORD").decode())))
    assert [row[0] for row in rows] == names(wheel)
    assert rows[-1][1:] == ["", ""]
    for name, digest, size in rows[:-1]:
        data = read(wheel, name)
        expected = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, size) == (f"sha256={expected}", str(len(data)))


def test_equal_entries_give_equal_bytes(cache, tmp_path, publish, device, host):
    for target in (device, host):
        publish(cache, target)
    first = made(cache, tmp_path / "one")
    again = Cache(tmp_path / "again", fsync=False)
    for target in (host, device):
        publish(again, target)
    old = os.umask(0o002)
    try:
        second = made(again, tmp_path / "two")
    finally:
        os.umask(old)
    assert first.name == second.name
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as archive:
        for info in archive.infolist():
            assert info.date_time == (1980, 1, 1, 0, 0, 0)
            assert info.external_attr >> 16 == 0o100644


# --- its name


@pytest.mark.parametrize(
    ("targets", "tag"),
    [
        (["cuda-sm_90-cu130-torch2.13.0"], "any"),
        (["cuda-sm_90-cu130-torch2.13.0", "cuda-sm_100a-cu130-torch2.13.0"], "any"),
        (["cpu-x86_64-torch2.13.0-linux_x86_64"], "linux_x86_64"),
        (["cuda-sm_90-cu130-torch2.13.0-linux_aarch64-cxx11_glibc2.36_cp311"], "linux_aarch64"),
        (["cuda-sm_90-cu130-torch2.14.0a0+git1-linux_x86_64", "cuda-sm_90-cu130-torch2.13.0"], "linux_x86_64"),
    ],
    ids=["device", "two", "cpu", "abi", "mixed"],
)  # fmt: skip
def test_its_platform_is_that_of_its_host_code(cache, tmp_path, publish, targets, tag):
    for target in targets:
        publish(cache, Target.parse(target))
    assert made(cache, tmp_path).name == f"acme_kernels-1.2.0-py3-none-{tag}.whl"


def test_host_code_for_two_platforms_is_a_clear_error(cache, tmp_path, publish, host):
    publish(cache, host)
    publish(cache, host._replace(platform="linux_aarch64"))
    for platform in ("", "any"):
        with pytest.raises(BundleError, match="linux_aarch64 and linux_x86_64: a wheel is for one"):
            made(cache, tmp_path / "dist", platform=platform)
    assert not (tmp_path / "dist").exists()


def test_a_platform_can_be_named(cache, tmp_path, publish, host):
    publish(cache, host)
    wheel = made(cache, tmp_path, platform="manylinux_2_17_x86_64.manylinux2014_x86_64")
    assert wheel.name.endswith("-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl")
    assert read(wheel, "WHEEL").decode().splitlines()[-2:] == [
        "Tag: py3-none-manylinux_2_17_x86_64",
        "Tag: py3-none-manylinux2014_x86_64",
    ]
    for odd in ("linux-x86_64", "../x", "Linux", "a b", "."):
        with pytest.raises(BundleError, match="is not a wheel platform"):
            made(cache, tmp_path, platform=odd)


@pytest.mark.parametrize("name", ["", "-x", "x-", "a/b", "../x", "ä", "a b", "x\n"])
def test_an_odd_name_is_a_clear_error(cache, tmp_path, publish, device, name):
    publish(cache, device)
    with pytest.raises(BundleError, match="is not a package name"):
        made(cache, tmp_path, name=name)


@pytest.mark.parametrize("name", ["acme-kernels", "Acme.Kernels", "acme__kernels", "ACME-.kernels"])
def test_a_name_is_normalised(cache, tmp_path, publish, device, name):
    publish(cache, device)
    assert made(cache, tmp_path, name=name).name.startswith("acme_kernels-1.2.0-")


@pytest.mark.parametrize("version", ["1", "0.1.0", "1.2.0rc1", "1.0.post1", "1.0.dev0", "1!2.0", "1.2+cu130"])  # fmt: skip
def test_versions_of_pep_440_are_taken(cache, tmp_path, publish, device, version):
    publish(cache, device)
    assert f"-{version}-" in made(cache, tmp_path, version=version).name


@pytest.mark.parametrize("version", ["", "x", "1.0-1", "1..0", "v1.0", "1.0/..", "1.0+", "01", "1.0\n", "١"])  # fmt: skip
def test_other_versions_are_a_clear_error(cache, tmp_path, publish, device, version):
    publish(cache, device)
    with pytest.raises(BundleError, match="is not a package version: expected something like"):
        made(cache, tmp_path, version=version)


def test_nothing_chosen_or_a_bad_place_is_a_clear_error(cache, tmp_path, publish, device):
    with pytest.raises(BundleError, match="nothing to pack"):
        made(cache, tmp_path)
    publish(cache, device)
    (tmp_path / "file").write_text("")
    with pytest.raises(BundleError, match="cannot make .*; name another directory"):
        made(cache, tmp_path / "file")


def test_a_damaged_entry_leaves_no_wheel(cache, tmp_path, publish, device):
    publish(cache, device)
    whole = chosen(cache, EntryFilter())
    (whole[0].path / "out.so").write_bytes(b"evil")
    with pytest.raises(BundleError, match="cannot be shipped"):
        pack_wheel(cache, whole, tmp_path / "dist", name="x", version="1")
    assert list((tmp_path / "dist").iterdir()) == []


# --- installed


@pytest.mark.long
@pytest.mark.parametrize("umask", [0o022, 0o002], ids=oct)
def test_pip_installs_it_into_a_python_that_finds_its_entries(
    cache, tmp_path, publish, device, host, umask
):
    keys = [publish(cache, target) for target in (device, host)]
    wheel = made(cache, tmp_path, platform="any")  # whatever machine the test runs on
    venv.EnvBuilder(with_pip=False, symlinks=True).create(tmp_path / "venv")
    python = str(tmp_path / "venv" / "bin" / "python")
    pip("--python", python, "install", "--no-deps", "--no-index", str(wheel), umask=umask)
    layers, found = look(python, tmp_path, keys)
    assert [layer.rpartition("/")[2] for layer in layers] == ["acme_kernels"]
    assert found == [f"{layers[0]}/v1/{key.target}/{key.name}" for key in keys]
    mode = (tmp_path / found[0] / "out.so").stat().st_mode & 0o777
    assert mode == 0o666 & ~umask
    assert not (tmp_path / "user").exists()


@pytest.mark.long
@pytest.mark.parametrize(("umask", "used"), [(0o022, True), (0o002, False)])
def test_one_beside_python_is_judged_by_its_owner(cache, tmp_path, publish, device, umask, used):
    keys = [publish(cache, device)]
    packages = tmp_path / "site-packages"
    wheel = made(cache, tmp_path)
    pip("install", "--no-deps", "--no-index", "--target", str(packages), str(wheel), umask=umask)
    layers, found = look(sys.executable, tmp_path, keys, f"sys.path.append({str(packages)!r})")
    assert layers == [str(packages / "jitkern_layers" / "acme_kernels")]
    assert [bool(path) for path in found] == [used]


# --- the command line


def test_the_command_writes_a_wheel(cli, cache_dir, tmp_path, publish, device):
    publish(Cache(cache_dir, fsync=False), device)
    out_dir = tmp_path / "dist"
    code, out, err = cli("cache", "pack", "--wheel", "-o", str(out_dir))
    path = out_dir / f"jitkern_prebuilt-{__version__}-py3-none-any.whl"
    assert (code, out) == (0, f"{path}\n")
    assert "1 entry packed" in err
    named = ("--name", "acme", "--version", "2.0", "--platform", "linux_x86_64")
    code, out, _ = cli("cache", "pack", "--wheel", *named, "-o", str(out_dir), "--json")
    report = json.loads(out.splitlines()[-1])
    assert (code, report["entries"]) == (0, 1)
    assert report["path"] == str(out_dir / "acme-2.0-py3-none-linux_x86_64.whl")


def test_its_errors_are_one_line_and_an_exit_code(cli, cache_dir, tmp_path, publish, device):
    code, _, err = cli("cache", "pack", "--wheel", "-o", str(tmp_path / "dist"))
    assert code == 1
    assert "nothing to pack" in err
    publish(Cache(cache_dir, fsync=False), device)
    code, _, err = cli("cache", "pack", "--wheel", "--version", "x", "-o", str(tmp_path / "dist"))
    assert code == 1
    assert err.count("\n") == 1
