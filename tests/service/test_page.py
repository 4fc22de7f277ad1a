"""The page for people at `/`: what it says, what it escapes, who may read it, and in Chromium."""

import base64
import hashlib
import html
import re

import pytest
from browser import OUTSIDE, chromium
from clients import HERE, MACHINE, VEC_ADD, Client
from helpers import until

import jitkern
from jitkern import jit
from jitkern.config import Config
from jitkern.service import builds, page as room_page, server as room
from jitkern.service.builds import Outcome
from jitkern.service.request import BuildRequest

HOSTILE = '<script>document.title="owned"</script>&\'"'
SAID = (
    f"could not compile `f` of x: f.cu:3:7: error: {HOSTILE} is undefined\nx.cu:9:9: error: another"
)


def read(answer):
    """The text of the page, as a person sees it."""
    assert answer.status == 200, answer
    text = re.sub("<style>.*?</style>", "", answer.body.decode(), flags=re.DOTALL)
    return html.unescape(re.sub("<[^>]*>", "\n", text))


def settings(answer):
    """The lines for a settings file."""
    return html.unescape(re.search("<pre>(.*?)</pre>", answer.body.decode(), re.DOTALL)[1])


class Failing:
    """A build that fails as a compiler does until the file `open` is there; slow ones wait for it."""

    def __init__(self, _ops, folder, _key):
        self.folder = folder

    def __call__(self, asked, jobs):
        if asked.op.startswith("slow"):
            until((self.folder / "open").exists)
        done = (self.folder / "open").exists()
        return Outcome(200, built=1) if done else Outcome(422, SAID, failed=True)


@pytest.fixture
def troubled(serve, monkeypatch):
    """A server with a build that runs, one that waits, and one that failed, of hostile names."""
    monkeypatch.setattr(room, "CallBuilder", Failing)
    server = serve(jobs=1)
    asked = [BuildRequest(op, op, (f"<b>{HERE}",), frozenset()) for op in (f"bad{HOSTILE}", "slow::runs", f"slow{HOSTILE}")]  # fmt: skip
    server.builds.submit(asked[0]).result()
    until(server.builds.failed)
    for one in asked[1:]:
        server.builds.submit(one)
    until(lambda: Client(server.url).figure("builds_running") == 1)
    yield server
    (server.catalog.folder / "open").touch()
    until(lambda: not server.builds.pending())


def test_it_tells_what_is_built_and_what_failed(troubled):
    text = read(Client(troubled.url).get("/"))
    for name, figure in (("Building", "1"), ("Waiting", "1"), ("Hit rate", "none yet")):
        assert re.search(rf"^{name}\n+{figure}$", text, re.MULTILINE), text
    assert re.search(r"^slow::runs\n+<b>\S+\n+building\n+for \d+ s$", text, re.MULTILINE), text
    assert re.search(r"^slow<script>.*\n+<b>\S+\n+waiting\n+for \d+ s$", text, re.MULTILINE), text
    assert re.search(r"^\d+ s ago\n+bad<script>.*\n+<b>\S+\n+f\.cu:3:7: error: .* is undefined$", text, re.MULTILINE), text  # fmt: skip
    assert "another" not in text


def test_what_others_wrote_is_escaped_and_no_script_is_allowed(troubled):
    client = Client(troubled.url)
    answer = client.get("/")
    body = answer.body.decode()
    assert HOSTILE not in body and html.escape(HOSTILE) in body
    assert not re.search("<script|<b>|javascript:|<link|<img", body)
    (style,) = re.findall("<style>(.*?)</style>", body, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = answer.headers["Content-Security-Policy"]
    assert policy.startswith(f"default-src 'none'; style-src 'sha256-{digest}';")
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert answer.headers["Cache-Control"] == "no-store"
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert re.findall("<meta http-equiv=[^>]*>", body) == ['<meta http-equiv=refresh content="5">']
    head = client.ask("HEAD", "/")
    assert (head.status, head.body) == (200, b"")
    assert head.headers["Content-Type"] == "text/html; charset=utf-8"
    assert client.ask("POST", "/", b"x").status == 405


def test_the_last_failures_are_kept_until_a_build_succeeds(serve, monkeypatch):
    monkeypatch.setattr(room, "CallBuilder", Failing)
    monkeypatch.setattr(builds, "MOST_FAILURES", 2)
    server = serve()
    asked = [BuildRequest(op, op, (HERE,), frozenset()) for op in ("a", "b", "c")]
    for one in asked:
        server.builds.submit(one).result()
    assert [failure.request.op for failure in server.builds.failed()] == ["c", "b"]
    (server.catalog.folder / "open").touch()
    server.builds.forget(asked[2].id)
    server.builds.submit(asked[2]).result()
    assert [failure.request.op for failure in server.builds.failed()] == ["b"]


@pytest.mark.long
def test_it_tells_what_lies_here_and_how_often_that_served(serve):
    client = Client(serve().url)
    for _ in range(4):
        assert client.build(VEC_ADD).status == 200
    text = read(client.get("/"))
    of_op = sum(row.op == "jitkern::vec_add" for row in jitkern.cache_tools.rows(jit.open_cache()))
    assert re.search(rf"^jitkern::vec_add\n+{MACHINE}\n+{of_op} entries\n+[\d.]+ KiB$", text, re.MULTILINE), text  # fmt: skip
    assert re.search(r"^Hit rate\n+75\.0%\n+4 requests for kernels, 1 build$", text, re.MULTILINE), text  # fmt: skip
    other = read(Client(serve(jitkern.ops.softmax).url).get("/"))
    assert "jitkern::runtime" in other and "vec_add" not in other  # which it does not serve


def test_rows_beyond_the_most_are_counted(serve, monkeypatch):
    monkeypatch.setattr(room_page, "MOST_ROWS", 2)
    server = serve()
    monkeypatch.setattr(server.catalog, "held", lambda: [(f"op{n}", HERE, 1, 7) for n in range(5)])
    text = read(Client(server.url).get("/"))
    assert "op1" in text and "op2" not in text and "and 3 more" in text


def test_its_lines_are_settings_with_the_url_of_the_client(serve, tmp_path):
    client = Client(serve().url)
    for headers, url in (
        ({}, client.connection.host),
        ({"Host": "localhost:8757"}, "http://localhost:8757"),
        ({"Host": "kernels.example", "X-Forwarded-Proto": "https"}, "https://kernels.example"),
        ({"Host": "[::1]:80"}, "http://[::1]:80"),
        ({"Host": '"]x=[<script>'}, client.connection.host),
    ):
        text = settings(client.get("/", **headers))
        (tmp_path / "config.toml").write_text(text)
        config = Config.from_env({}, [tmp_path / "config.toml"])
        assert len(config.remote) == 1 and url in config.remote[0], text
        assert config.trusted_remotes == config.remote
    text = settings(client.get("/", Host="kernels.example"))  # which http could not vouch for
    assert "trusted_remotes" not in text and "--key FILE" in text


@pytest.mark.usefixtures("signing_package")
def test_with_a_key_its_lines_have_the_public_one_alone(serve, tmp_path):
    public = jitkern.cache_tools.keygen(tmp_path / "key")
    client = Client(serve(key=tmp_path / "key", token=b"s3cret-token").url)
    answer = client.get("/", Authorization="Bearer s3cret-token")
    (tmp_path / "config.toml").write_text(settings(answer))
    config = Config.from_env({}, [tmp_path / "config.toml"])
    assert config.trusted_keys == (public.split()[1],)
    assert config.remote_token_file and not config.trusted_remotes
    private = (tmp_path / "key").read_text().splitlines()[1]
    assert b"s3cret-token" not in answer.body and private.encode() not in answer.body
    assert str(tmp_path).encode() not in answer.body


def test_a_browser_may_show_the_token_as_a_password(serve):
    client = Client(serve(token=b"secret").url)

    def basic(text):
        return f"Basic {base64.b64encode(text).decode()}"

    for wrong in ("", "Basic", "Basic secret", "Basic ä", "Bearer wrong", basic(b"secret"), basic(b"secret:"), basic(b"x:wrong")):  # fmt: skip
        answer = client.get("/", Authorization=wrong)
        assert answer.status == 401 and b"<html" not in answer.body, wrong
        scheme = "Bearer" if wrong.startswith("Bearer") else "Basic"
        assert answer.headers["WWW-Authenticate"].partition(" ")[0] == scheme
    for right in ("Bearer secret", basic(b"me:secret"), basic(b":secret")):
        assert client.get("/", Authorization=right).status == 200
        other = client.get("/metrics", Authorization=right)  # programs have headers
        assert other.status == (200 if right.startswith("Bearer") else 401)


@pytest.mark.long
def test_chromium_shows_it_at_any_width_and_runs_nothing(troubled, tmp_path):
    held = [(f"some_package::an_operator_{n}", f"cuda-sm_90-cu130-torch2.13.{n}", 3, 70_000) for n in range(30)]  # fmt: skip
    troubled.catalog.held = lambda: held
    troubled.token = b"secret"
    address = troubled.url.replace("//", "//me:secret@")
    with chromium(tmp_path) as browser:
        for width in (1280, 400):
            colors = set()
            for dark in (False, True):
                browser.open(f"{address}/", width, dark=dark)
                assert browser.value("document.title") == "jitkern serve"
                text = browser.value("document.body.innerText")
                assert HOSTILE in text and "an_operator_29" in text
                assert browser.value(OUTSIDE) == []
                assert browser.value("document.documentElement.scrollWidth <= innerWidth")
                colors.add(browser.value("getComputedStyle(document.querySelector('h1')).color"))
                lines = "(r => (r.selectNodeContents(document.querySelector('.failures td')), r.getClientRects().length))"
                assert browser.value(f"{lines}(document.createRange())") == 1  # `7 s ago`
                style = "getComputedStyle(document.querySelector('dl')).display"
                assert browser.value(style) == "grid"  # so the policy allows its style
            assert len(colors) == 2
