"""POST /v1/build: what is missing is built, once, from what is installed here."""

import json

import pytest
import torch
from clients import HERE, MACHINE, VEC_ADD, Client, Gate, asked, at_once, figures, line, tensor
from helpers import H100, declared, needs_nvrtc, until

from jitkern import cache_tools, config, jit
from jitkern.cache.store import Cache
from jitkern.op.needed_kernels import needs_of
from jitkern.service import builds, request, server as room
from jitkern.target import Target

TWICE = 'extern "C" void twice(T *out, const T *x, long n) { for (long i = 0; i < n; i++) out[i] = 2 * x[i]; }\n'


def launch_twice(k, x):
    out = torch.empty_like(x)
    k.twice[{"T": x.dtype}](out, x, x.numel())
    return out


def metrics(client):
    return figures(client.get("/metrics").body)


def unpacked(answer, tmp_path):
    """The entries of a bundle, in a cache of their own."""
    path = tmp_path / "answer.tar"
    path.write_bytes(answer.body)
    cache = Cache(tmp_path / "unpacked")
    cache_tools.unpack(cache, path)
    return [row.variant.partition(".")[0] or row.op for row in cache_tools.rows(cache)]


@pytest.mark.long
def test_an_answer_holds_kernel_runtime_and_plan(client, tmp_path):
    answer = client.build(VEC_ADD)
    assert (answer.status, answer.headers["Jitkern-Builds"]) == (200, "1")
    assert sorted(unpacked(answer, tmp_path)) == ["call", "f32", "jitkern::runtime"]


@pytest.mark.long
def test_60_clients_at_once_cause_one_build(serve):
    url = serve(jobs=2).url
    answers = at_once(60, lambda _: Client(url).build(VEC_ADD))
    assert [a.status for a in answers] == [200] * 60
    assert len({a.body for a in answers}) == 1
    found = metrics(Client(url))
    assert found['jitkern_serve_builds_total{status="200"}'] == 1
    assert found["jitkern_serve_built_entries_total"] == 3


@pytest.mark.long
def test_an_evicted_bundle_is_built_again_the_same(serve):
    server = serve()
    client = Client(server.url)
    first = client.build(VEC_ADD)
    assert client.build(VEC_ADD.replace(",", ", ")).body == first.body  # the same call
    assert metrics(client)['jitkern_serve_builds_total{status="200"}'] == 1
    for path in server.catalog.folder.glob("*.tar"):
        path.unlink()
    assert client.build(VEC_ADD).body == first.body
    found = metrics(client)
    assert found['jitkern_serve_builds_total{status="200"}'] == 2
    assert found["jitkern_serve_built_entries_total"] == 3  # the second found all in the cache


def test_an_undeclared_op_is_404(client):
    answer = client.build(line("jitkern::muladd", tensor(4), tensor(4), tensor(4)))
    assert (answer.status, answer.json["serves"]) == (404, ["jitkern::vec_add"])
    assert "jitkern::muladd" in answer.json["reason"]


@pytest.mark.long
def test_a_changed_source_is_409_and_names_the_file(serve, tmp_path):
    op = declared("served::twice(Tensor x) -> Tensor", tmp_path / "twice.cpp", TWICE, launch_twice)
    (source,) = op.sources["cpu"]
    op.samples(lambda device: [torch.empty(8, device=device)])
    (variant,) = needs_of(op, source, "cpu").variants
    of_client = jit.key_of(variant, Target.current("cpu")).digest
    client = Client(serve(op).url)
    call = line("served::twice", tensor(8))
    assert client.build(call, want=[of_client]).status == 200
    assert client.build(call, want=[of_client[:16]]).status == 200
    (tmp_path / "twice.cpp").write_text(f"// changed\n{TWICE}")
    other = line("served::twice", tensor(9))
    answer = client.build(other, want=[of_client])
    assert answer.status == 409
    ((file, sha),) = answer.json["files"].items()
    assert (file.endswith("twice.cpp"), len(sha)) == (True, 64)
    assert f"{file} ({sha[:12]})" in answer.json["reason"]
    assert of_client[:16] in answer.json["reason"]
    assert of_client[:16] not in answer.json["digests"]


@pytest.mark.long
def test_what_cannot_be_built_is_422_with_the_reason(serve, tmp_path):
    broken = TWICE.replace("2 * x[i]", "two")
    op = declared("served::bad(Tensor x) -> Tensor", tmp_path / "bad.cpp", broken, launch_twice)
    client = Client(serve(op).url)
    answer = client.build(line("served::bad", tensor(8)))
    assert answer.status == 422
    assert "two" in answer.json["reason"]
    for call, targets, reason in [
        (line("served::bad"), [HERE], "got no x"),
        (line("served::bad", 3), [HERE], "launch function failed"),
        (line("served::bad", tensor(8), kind="nvrtc"), [HERE], "no nvrtc source"),
        (line("served::bad", tensor(8)), [H100], "no target is of this"),
        (line("served::bad", tensor(8)), ["nonsense"], "is not a target"),
        (line("served::bad", tensor(8)), ["cpu-aarch64-torch2.13.0"], "aarch64"),
    ]:
        answer = client.build(call, targets)
        assert (answer.status, reason in answer.json["reason"]) == (422, True), answer.body


NO_REQUESTS = [
    b"", b"x", b"[]", b"{}", b"[" * 100_000, b"\xff", b'{"schema":1}', b'{"schema":2}', asked("x"), asked("[]"), asked("{}"),
    asked(VEC_ADD, []), asked(VEC_ADD, [1]), asked(VEC_ADD, [HERE] * 9), asked(VEC_ADD, want=["x"]),
    asked(VEC_ADD, want=[1]), asked(VEC_ADD, want=["0" * 16] * 1001), asked(VEC_ADD.replace("1000", "1" * 1000)),
    asked(VEC_ADD.replace("1000", "NaN")), asked(VEC_ADD.replace('"cpu"', '"c/p"')),
    asked(line("jitkern::vec_add", 'x"); system("id')), asked(VEC_ADD.replace("cc", "../cc")),
]  # fmt: skip


def test_what_is_no_request_is_400(client):
    for body in NO_REQUESTS:
        answer = client.ask("POST", "/v1/build", body)
        assert (answer.status, bool(answer.json["reason"])) == (400, True), body


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"schema":1}', 'it is not a request to build: it has no "call"'),
        (asked("{}"), 'its call is not a line of a recording; it has no "schema"'),
        (asked("x"), "its call is not JSON: Expecting value"),
        (b"x", "it is not JSON: Expecting value"),
    ],
)
def test_what_a_request_lacks_is_told_without_a_python_error(client, body, says):
    assert client.ask("POST", "/v1/build", body).json["reason"].startswith(says)


NO_ARGUMENTS = [
    tensor(2**63 - 1, 2**63 - 1), {**tensor(4), "more": 1}, {**tensor(4), "stride": [1, 1]},
    {**tensor(4), "shape": [-1]}, {**tensor(4), "shape": [True]}, {**tensor(4), "tensor": "_inductor"},
    {**tensor(4), "tensor": "float7"}, tensor(*[1] * 65), {"dtype": "compiler"}, {"device": "nowhere"}, {"float": "x"}, {},
]  # fmt: skip


def test_an_argument_that_is_none_is_422(client):
    for argument in NO_ARGUMENTS:
        answer = client.build(line("jitkern::vec_add", argument, argument))
        assert (answer.status, "not a line" in answer.json["reason"]) == (422, True), answer.body


@pytest.mark.long
def test_arguments_must_be_a_list_and_allocate_nothing(client):
    call = line("jitkern::vec_add").replace("[]", json.dumps(tensor(10**9)))
    assert client.build(call).status == 422
    huge = tensor(2**40)
    assert client.build(line("jitkern::vec_add", huge, huge)).status == 200


@pytest.mark.long
def test_a_body_over_1_mib_is_413(client):
    padding = b" " * (request.MAX_BYTES - len(asked(VEC_ADD)))
    assert client.ask("POST", "/v1/build", asked(VEC_ADD) + padding).status == 200
    answer = client.ask("POST", "/v1/build", asked(VEC_ADD) + padding + b" ")
    assert (answer.status, answer.headers["Connection"]) == (413, "close")


@pytest.mark.long
def test_the_target_of_the_client_decides(client, tmp_path):
    other = "cpu-x86_64-torch2.12.0"
    answer = client.build(VEC_ADD, [HERE, other])
    assert answer.status == 200
    unpacked(answer, tmp_path)
    rows = cache_tools.rows(Cache(tmp_path / "unpacked"))
    built = {row.target for row in rows if row.variant == "f32"}
    assert built == {f"{HERE}-linux_x86_64", f"{other}-linux_x86_64"}


@pytest.mark.long
@needs_nvrtc
def test_a_service_without_a_gpu_builds_for_one(client, tmp_path, monkeypatch):
    call = line("jitkern::vec_add", tensor(1000), tensor(1000), kind="nvrtc")
    answer = client.build(call.replace('"cpu"', '"cuda"'), [H100])
    assert answer.status == 200, answer.body
    assert sorted(unpacked(answer, tmp_path)) == ["call", "f32", "jitkern::runtime"]
    machines = {bundle.path.parent.name for _, bundle in Cache(tmp_path / "unpacked").entries()}
    assert machines == {H100, f"{H100}-linux_x86_64", MACHINE}


@pytest.mark.long
def test_without_a_compiler_for_one_target_the_other_is_built(client, tmp_path):
    targets = [HERE, "cpu-aarch64-torch2.13.0"]
    answer = client.build(VEC_ADD, targets)
    assert answer.status == 200
    assert sorted(unpacked(answer, tmp_path)) == ["call", "f32", "jitkern::runtime"]
    (kernel,) = [e for _, e in Cache(tmp_path / "unpacked").entries() if e.variant == "f32"]
    assert client.build(VEC_ADD, targets, [kernel.manifest.digest]).body == answer.body
    wanted = client.build(VEC_ADD, targets, ["0" * 16])
    assert (wanted.status, "aarch64" in wanted.json["reason"]) == (422, True)
    assert client.build(VEC_ADD, targets[:1], ["0" * 16]).status == 409


def test_a_long_build_is_202_and_then_found_where_it_says(gated, monkeypatch):
    server = gated()
    client = Client(server.url)
    monkeypatch.setattr(room.Server, "patience", 0.05)
    first = client.build(VEC_ADD)
    assert (first.status, first.headers["Retry-After"]) == (202, "2")
    place = first.headers["Location"]
    assert client.get(place).status == 202
    assert client.build(VEC_ADD).headers["Location"] == place  # the same build
    (server.catalog.folder / "open").touch()
    monkeypatch.setattr(room.Server, "patience", 600.0)
    assert client.get(place)[::2] == (200, b"bundle")
    assert client.build(VEC_ADD)[::2] == (200, b"bundle")
    assert len([*server.catalog.folder.glob("begun-*")]) == 1
    assert client.get(f"/v1/build/{'0' * 64}").status == 404


def test_a_client_may_want_an_earlier_answer(gated):
    client = Client(gated().url)
    assert client.build(VEC_ADD, Prefer="wait=0").status == 202


def test_a_full_queue_is_429(gated, monkeypatch):
    monkeypatch.setattr(builds, "MOST_WAITING", 2)
    server = gated(jobs=1)
    monkeypatch.setattr(room.Server, "patience", 0.0)
    client = Client(server.url)
    calls = [line("jitkern::vec_add", tensor(n), tensor(n)) for n in range(1, 6)]
    assert client.build(calls[0]).status == 202
    until(lambda: client.figure("builds_running"))
    assert [client.build(call).status for call in calls[1:]] == [202, 202, 429, 429]
    assert client.build(calls[1]).status == 202  # whoever asks for the same waits with the others
    answer = client.build(calls[4])
    assert answer.headers["Retry-After"] == "5"
    assert answer.json["reason"] == "2 builds are queued already"
    (server.catalog.folder / "open").touch()
    monkeypatch.setattr(room.Server, "patience", 600.0)
    assert {client.build(call).status for call in calls[:3]} == {200}


@pytest.mark.long
def test_a_worker_that_dies_or_hangs_is_422_and_replaced(gated, monkeypatch):
    monkeypatch.setattr(room.Server, "modules", {}, raising=False)
    server = gated(jobs=1)
    server.ops = {**server.ops, "x::dies": None}
    (server.catalog.folder / "open").touch()
    client = Client(server.url)
    answer = client.build(line("x::dies"))
    assert (answer.status, "SIGKILL" in answer.json["reason"]) == (422, True)
    assert client.build(VEC_ADD).status == 200
    (server.catalog.folder / "open").unlink()
    longest, server.builds.longest = server.builds.longest, 0.2
    answer = client.build(line("jitkern::vec_add", tensor(3), tensor(3)))
    assert (answer.status, "took more than" in answer.json["reason"]) == (422, True)
    server.builds.longest = longest
    (server.catalog.folder / "open").touch()
    assert client.build(line("jitkern::vec_add", tensor(4), tensor(4))).status == 200


def test_an_error_of_the_service_itself_is_500_and_not_kept(gated, monkeypatch, caplog):
    class Broken(Gate):
        def __call__(self, asked, jobs):
            if not (self.folder / "open").exists():
                raise ValueError("the text of a bug")
            return super().__call__(asked, jobs)

    monkeypatch.setattr(room, "CallBuilder", Broken)
    server = gated()
    client = Client(server.url)
    answer = client.build(VEC_ADD)
    assert (answer.status, "see the log" in answer.json["reason"]) == (500, True)
    assert "the text of a bug" not in answer.json["reason"] and "the text of a bug" in caplog.text
    (server.catalog.folder / "open").touch()
    assert client.build(VEC_ADD)[::2] == (200, b"bundle")


def test_old_outcomes_are_forgotten(gated, monkeypatch):
    server = gated()
    (server.catalog.folder / "open").touch()
    client = Client(server.url)
    client.build(VEC_ADD)
    monkeypatch.setattr(builds, "KEPT", -1.0)
    client.build(VEC_ADD)
    assert client.figure('builds_total{status="200"}') == 2
    monkeypatch.setattr(builds, "KEPT", 600.0)
    monkeypatch.setattr(builds, "MOST_KEPT", 3)
    calls = [line("jitkern::vec_add", tensor(n), tensor(n)) for n in range(1, 8)]
    for call in calls:
        client.build(call)
    for call in calls[-3:]:
        client.build(call)
    assert client.figure('builds_total{status="200"}') == 9
    client.build(calls[0])
    assert client.figure('builds_total{status="200"}') == 10


@pytest.mark.long
def test_a_cache_that_cannot_be_written_is_503_and_not_kept(serve, tmp_path, monkeypatch):
    with config.using(cache_dir=tmp_path / "served"):
        server = serve()
    client = Client(server.url)
    (tmp_path / "served").mkdir(exist_ok=True)
    (tmp_path / "served" / "v1").write_text("in the way")
    answer = client.build(VEC_ADD)
    assert (answer.status, bool(answer.json["reason"])) == (503, True)
    (tmp_path / "served" / "v1").unlink()
    assert client.build(VEC_ADD).status == 200
