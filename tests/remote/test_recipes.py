"""docs/shipping.md: its recipes for buckets, servers, disks and pods run as they are written there."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import servers
from bucket_stubs import BUCKET, serving
from helpers import LONGEST, ran
from test_shipping import PAGE, SERVE, block, recipe

from jitkern.cli import parser
from jitkern.config import Config
from jitkern.remote import layout
from jitkern.target import Target

KEY = "ed25519 7ygbmVtqSqDGBQ9C9iQ8t4eA6rpR9BdcT8cbvJiNxUM= release"  # of the page
URL = f"s3://{BUCKET}/mypkg"
PYTHON = f"{sys.executable} -W ignore"
PROGRAMS = (
    f'python() {{ {PYTHON} "$@"; }}; jitkern() {{ {PYTHON} -m jitkern "$@"; }}; pip() {{ :; }}\n'
)


class Release:
    """A project whose kernels are built, and the key that signs them."""

    def __init__(self, folder):
        self.project = folder / "mypkg"
        self.cache = folder / "cache"
        self.shell("jitkern init mypkg", folder)
        (self.project / "serve.py").write_text(SERVE)
        self.shell(block("sh", "keygen"), self.project)
        self.shell("jitkern prewarm mypkg", self.project)
        self.public = (self.project / "release-key.pub").read_text().strip()

    def shell(self, script, cwd=None, **environment):
        where = {"JITKERN_CACHE_DIR": str(self.cache), "PYTHONPATH": f"{self.project}/src"}
        env = {**os.environ, **where, **environment}
        command = ("/bin/sh", "-ec", PROGRAMS + script)
        return ran(*command, cwd=cwd or self.project, env=env, timeout=300)

    def node(self, folder, settings, command="python serve.py", **environment):
        """The figures of a program on a machine with a settings file, a cache of its own, and no compiler."""
        file = folder / "config" / "jitkern" / "config.toml"
        file.parent.mkdir(parents=True, exist_ok=True)
        assert KEY in settings
        file.write_text(settings.replace(KEY, self.public))
        of_its_own = {
            "JITKERN_CACHE_DIR": str(folder / "node"), "XDG_CONFIG_HOME": str(folder / "config"),
            "JITKERN_COMPILE": "never",
        }  # fmt: skip
        out = self.shell(command, **{**of_its_own, **environment})
        return json.loads(out) if out.startswith("{") else out


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    pytest.importorskip("cryptography")
    return Release(tmp_path_factory.mktemp("release"))


def settings_of_a_remote(url=URL):
    text = block("toml", 'remote = "').replace(URL, url)
    assert f'"{url}"' in text
    return "".join(line for line in text.splitlines(True) if "token" not in line)


def assert_nothing_was_compiled(stats):
    assert (stats["compiles"], stats["runtimes"], stats["failures"]) == (0, 0, 0)
    assert stats["hits"] >= 4


def allows(policy, who, verb, name, headers, whole_bucket=False):
    """Whether S3 would let somebody do this: allowed by a statement, and denied by none."""
    action = {"PUT": "s3:PutObject", "DELETE": "s3:DeleteObject"}.get(verb, "s3:GetObject")
    action = "s3:ListBucket" if whole_bucket else action
    resource = f"arn:aws:s3:::{BUCKET}" + ("" if whole_bucket else f"/{name}")
    given = {f"s3:{header.lower()}" for header in headers}

    def matches(patterns):
        patterns = [patterns] if isinstance(patterns, str) else patterns
        return any(fnmatch.fnmatchcase(resource, pattern) for pattern in patterns)

    def fits(statement):
        principal = statement["Principal"]
        principals = [principal] if principal == "*" else principal["AWS"]
        if principals != ["*"] and who not in str(principals):
            return False
        if "NotResource" in statement and matches(statement["NotResource"]):
            return False
        if "Resource" in statement and not matches(statement["Resource"]):
            return False
        absent = statement.get("Condition", {"Null": {}})["Null"]
        assert set(absent.values()) <= {"true"}
        return statement["Action"] == action and not given & set(absent)

    effects = {s["Effect"] for s in policy["Statement"] if fits(s)}
    return effects == {"Allow"}


def asked(stub, since):
    """What was asked of a stub: the verb, the object, the headers, and whether it was a listing."""
    for verb, path, headers in stub.requests[since:]:
        name = path.partition("?")[0].removeprefix(f"/{BUCKET}").strip("/")
        yield verb, name, headers, "list-type" in path


@pytest.mark.long
def test_a_bucket_is_used_as_its_policy_lets(release, tmp_path):
    pytest.importorskip("obstore")
    policy = json.loads(recipe("bucket-policy.json"))
    script = block("sh", "--to s3://")
    names = set()
    with serving("s3") as stub:
        bucket = stub.environment(tmp_path)
        release.shell(
            f"jitkern remote push --op mypkg::scale --to {URL} --key release-key", **bucket
        )
        assert "mypkg" in release.shell(script, **bucket)  # which replaces the index
        by_ci = len(stub.requests)
        stats = release.node(tmp_path, settings_of_a_remote(), **bucket)
        assert_nothing_was_compiled(stats)
        assert stats["fetched"] >= 1
        for verb, name, headers, listing in asked(stub, 0):
            who = "role/ci"
            assert allows(policy, who, verb, name, headers, listing), (verb, name, headers)
            if verb == "PUT":
                names.add(name)
                bare = {k: v for k, v in headers.items() if not k.lower().startswith("if-")}
                assert bare != headers
                assert not allows(policy, who, verb, name, bare)
        assert names == set(stub.objects)
        for verb, name, headers, listing in asked(stub, by_ci):
            assert verb == "GET"
            assert allows(policy, "role/node", verb, name, headers, listing)
    conditional = {"If-None-Match": "*"}
    for name in names:
        assert not allows(policy, "role/node", "PUT", name, conditional)
        assert not allows(policy, "role/other", "GET", name, {})
        replaced = allows(policy, "role/ci", "PUT", name, {"If-Match": "tag"})
        assert replaced == name.endswith("/index.json")
        assert not allows(policy, "role/ci", "DELETE", name, {})
    assert {name.rpartition(".")[2] for name in names} >= {"json", "zst"}


def objects_of_a_remote():
    """The names of objects below the prefix of the page, each with its size and whether it is a bundle."""
    machine = "cpu-x86_64-torch2.13.0-linux_x86_64"
    return [
        (f"mypkg/{layout.ROOT}", len(layout.ROOT_CONTENT), False),
        (f"mypkg/{layout.index_of(machine)}", 100, False),
        (f"mypkg/{layout.index_of(machine)}", layout.LARGEST_INDEX, False),
        *((f"mypkg/{layout.bundle_of(machine, '0' * 64 + end)}", layout.LARGEST_INDEX + 1, True) for end in (".tar", ".tar.zst")),
    ]  # fmt: skip


def test_the_lifecycle_rules_of_buckets_meet_bundles_alone():
    (of_s3,) = json.loads(block("json", "ObjectSizeGreaterThan"))["Rules"]
    found = of_s3["Filter"]["And"]
    assert (of_s3["Status"], of_s3["Expiration"]) == ("Enabled", {"Days": 90})
    (of_gcs,) = json.loads(block("json", "matchesSuffix"))["rule"]
    where = of_gcs["condition"]
    assert (of_gcs["action"], where["age"]) == ({"type": "Delete"}, 90)
    for name, size, is_bundle in objects_of_a_remote():
        by_s3 = name.startswith(found["Prefix"]) and size > found["ObjectSizeGreaterThan"]
        by_gcs = name.startswith(tuple(where["matchesPrefix"])) and name.endswith(tuple(where["matchesSuffix"]))  # fmt: skip
        assert by_s3 == by_gcs == is_bundle, name


def test_the_line_for_a_directory_deletes_old_bundles_alone(tmp_path):
    for number, (name, _, _) in enumerate(objects_of_a_remote()):
        path = tmp_path / name.removeprefix("mypkg/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if number < 4:
            os.utime(path, (1, 1))
    line = block("sh", "-delete").replace("/srv/kernels", str(tmp_path))
    subprocess.run(["/bin/sh", "-ec", line], check=True)
    left = {path.name for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {layout.ROOT, "index.json", f"{'0' * 64}.tar.zst"}


@pytest.mark.conformance
def test_the_recipe_for_a_bucket_runs_on_moto(release, tmp_path, server):
    pytest.importorskip("obstore")
    bucket = server("moto")
    release.shell(block("sh", "--to s3://"), **bucket)
    assert_nothing_was_compiled(release.node(tmp_path, settings_of_a_remote(), **bucket))


def pushed(release, folder):
    """The recipe for a static server, with its directory here; returns that."""
    script = block("sh", "--to file:///srv/kernels")
    release.shell(script.replace("/srv/kernels", str(folder / "served")))
    return folder / "served"


@pytest.mark.conformance
def test_nginx_serves_a_directory_as_the_page_configures_it(release, tmp_path):
    root = pushed(release, tmp_path)
    site = recipe("static-server.conf")
    assert "root /srv/kernels;" in site
    tmp_path.chmod(0o755)
    (tmp_path / "nginx").mkdir()
    site = site.replace("/srv/kernels", str(root))
    with servers.nginx(tmp_path / "nginx", root, site) as url:
        seen = set()
        for path in filter(Path.is_file, root.rglob("[!.]*")):
            name = path.relative_to(root).as_posix()
            with urllib.request.urlopen(f"{url}/{name}") as answer:
                assert answer.headers["Cache-Control"] == layout.cache_control(name), name
            seen.add(name.rpartition("/")[2])
        assert {layout.ROOT, "index.json"} < seen
        for name, data, status in ((layout.ROOT, b"x", 405), ("v1/none/index.json", None, 404)):
            with pytest.raises(urllib.error.HTTPError) as raised:
                urllib.request.urlopen(f"{url}/{name}", data)
            raised.value.close()
            assert (raised.value.code, raised.value.headers["Cache-Control"]) == (status, None)
        stats = release.node(tmp_path, settings_of_a_remote(url))
    assert_nothing_was_compiled(stats)
    assert stats["fetched"] >= 1


MISSING = "python -c 'import torch, mypkg; mypkg.add_relu(*[torch.ones(3, dtype=torch.int32)] * 2)'"


@pytest.mark.conformance
def test_nginx_before_the_service_ends_tls_and_keeps_bundles(release, tmp_path):
    site = recipe("service-proxy.conf")
    openssl = servers.program("openssl", "apt-get install openssl")
    certificate = f"req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1 -keyout {tmp_path}/kernels.key -out {tmp_path}/kernels.crt"
    subprocess.run([openssl, *certificate.split()], check=True, capture_output=True)
    (tmp_path / "nginx").mkdir()
    cache = tmp_path / "service"
    shutil.copytree(release.cache, cache)
    options = "serve mypkg --listen 127.0.0.1:0 --key release-key -v"
    command = [*PYTHON.split(), "-m", "jitkern", *options.split()]
    around = {"JITKERN_CACHE_DIR": str(cache), "PYTHONPATH": f"{release.project}/src"}
    with (tmp_path / "log").open("w") as log:
        service = subprocess.Popen(
            command, cwd=release.project, env={**os.environ, **around}, stdout=subprocess.PIPE, stderr=log, text=True
        )  # fmt: skip
    try:
        url = re.search(r"http://\S+:\d+", service.stdout.readline())[0]
        for there, here in {
            "http://127.0.0.1:8757": url, "/var/cache/nginx": str(tmp_path / "nginx"), "/etc/nginx": str(tmp_path),
        }.items():  # fmt: skip
            assert there in site
            site = site.replace(there, here)
        with servers.nginx(tmp_path / "nginx", tmp_path, site) as url:
            settings = settings_of_a_remote(url.replace("http:", "https:"))
            around = {"SSL_CERT_FILE": str(tmp_path / "kernels.crt")}
            for node in ("first", "second"):
                stats = release.node(tmp_path / node, settings, **around)
                assert_nothing_was_compiled(stats)
                assert stats["fetched"] >= 1
            bundles = re.findall(r"GET \S+\.tar\S* ", (tmp_path / "log").read_text())
            assert bundles and len(bundles) == len(set(bundles))  # the second node's are nginx's
            release.node(tmp_path / "second", settings, MISSING, **around)
            assert "POST /v1/build HTTP/1.0' 200" in (tmp_path / "log").read_text()
    finally:
        service.terminate()
        service.communicate(timeout=LONGEST)


@pytest.mark.long
def test_a_shared_disk_is_a_signed_layer_or_a_remote(release, tmp_path):
    disk = tmp_path / "disk"
    shutil.copytree(release.cache, disk)
    release.shell(block("sh", "export JITKERN_CACHE_DIR=/mnt").replace("/mnt/kernels", str(disk)))
    text = block("toml", "signed")
    found = settings_in(text, tmp_path)
    assert found.signed == found.system_cache == (Path("/mnt/kernels"),) and found.trusted_keys
    stats = release.node(tmp_path / "layer", text.replace("/mnt/kernels", str(disk)))
    assert_nothing_was_compiled(stats)
    remote = pushed(release, tmp_path)
    stats = release.node(tmp_path / "remote", settings_of_a_remote(remote.as_uri()))
    assert_nothing_was_compiled(stats)
    assert stats["fetched"] >= 1


def settings_in(text, folder):
    (folder / "config.toml").write_text(text)
    return Config.from_env({}, [folder / "config.toml"])


def test_the_settings_of_the_page_are_settings(tmp_path):
    found = settings_in(block("toml", 'remote = "'), tmp_path)
    assert (found.remote, found.trusted_keys) == ((URL,), (KEY.split()[1],))
    for line in re.findall(r"`(remote = [^`]+)`", PAGE):
        assert settings_in(line, tmp_path).remote


@pytest.mark.long
def test_the_init_container_fills_the_cache_of_its_pod(release, tmp_path):
    yaml = pytest.importorskip("yaml", reason="needs the extra docs: pip install jitkern[docs]")
    settings, pod = yaml.safe_load_all(recipe("pod.yaml"))
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    (first,), (second,) = pod["spec"]["initContainers"], pod["spec"]["containers"]
    for container in (first, second):
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"kernels": "/kernels", "settings": "/etc/jitkern"}
        assert container["image"] == first["image"]
    assert set(volumes) == set(mounts)
    assert volumes["settings"]["configMap"]["name"] == settings["metadata"]["name"]
    program, *arguments = first["command"]
    parsed = parser(arguments).parse_args(arguments)
    assert (program, parsed.packages) == ("jitkern", ["mypkg"])
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)  # as the root of every emptyDir
    text = settings["data"]["config.toml"].replace(URL, pushed(release, tmp_path).as_uri())
    text = text.replace("/kernels/cache", f"{tmp_path}/kernels/cache")
    script = shlex.join(first["command"]).replace(parsed.target[0], str(Target.current("cpu")))
    release.node(tmp_path, text, script, **variables(first, tmp_path))
    stats = release.node(
        tmp_path, text, shlex.join(second["command"]), JITKERN_OFFLINE="1", **variables(second, tmp_path)
    )  # fmt: skip
    assert_nothing_was_compiled(stats)
    assert not (tmp_path / "node" / "v1").exists()  # all that is needed was in the layer


def variables(container, folder):
    return {
        e["name"]: e["value"].replace("/kernels", f"{folder}/kernels") for e in container["env"]
    }


def test_the_service_is_started_with_options_that_exist(tmp_path, monkeypatch):
    program, *arguments = shlex.split(block("sh", "jitkern serve").splitlines()[-1])
    monkeypatch.chdir(tmp_path)
    for option in ("--key", "--token-file"):
        (tmp_path / arguments[arguments.index(option) + 1]).touch()
    parsed = parser(arguments).parse_args(arguments)
    assert (program, parsed.what) == ("jitkern", ["mypkg"])
