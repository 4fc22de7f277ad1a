"""The page for people at `/`: what is built, what failed, what lies here, and how to use it.

Names of ops, lines of compilers and the host are texts of others: all are escaped, and the answer
forbids everything but its own style.
"""

from __future__ import annotations

import base64
import hashlib
import html
import time
from collections.abc import Iterable, Sequence

from jitkern.cache_tools.check import counted, headline, human_age, human_bytes
from jitkern.remote.store import is_loopback
from jitkern.service.server import Server

REFRESH = 5  # seconds
MOST_ROWS = 200
_STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --bad: #ff8a80; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .25rem 0; }
small { opacity: .75; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(8rem, 1fr)); gap: .75rem; }
dl div { background: var(--soft); border-radius: .5rem; padding: .5rem .75rem; }
dd { margin: 0; font-size: 1.5rem; }
dd small { display: block; font-size: .8rem; }
pre, code { font: .85rem/1.5 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { background: var(--soft); border-radius: .5rem; padding: .75rem; white-space: pre-wrap; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line); }
td { overflow-wrap: break-word; vertical-align: top; }
.table { overflow-x: auto; }
.failures td:last-child {
  color: var(--bad); font: .85rem/1.5 ui-monospace, monospace; overflow-wrap: anywhere;
}
@media (max-width: 44rem) {
  thead { display: none; }
  tr { display: block; padding: .35rem 0; border-bottom: 1px solid var(--line); }
  td { display: block; padding: 0; border: 0; }
}
"""
_FIGURE = "<div><dt>{}</dt><dd>{}<small>{}</small></dd></div>"
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_HASH}'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def page(server: Server, url: str) -> bytes:
    """Return the page in HTML. url: of the server, as who asks for the page calls it."""
    now, held = time.monotonic(), server.catalog.held()
    pending = [
        (b.asked.op, ", ".join(b.asked.targets), "building" if b.future.running() else "waiting",
         f"for {human_age(now - b.since)}")
        for b in server.builds.pending()
    ]  # fmt: skip
    failures = [
        (f"{human_age(now - b.since)} ago", b.asked.op, ", ".join(b.asked.targets),
         headline(b.future.result().reason)[0])
        for b in server.builds.failed()
    ]  # fmt: skip
    entries = [(op, target, counted(n, "entry"), human_bytes(size)) for op, target, n, size in held]
    figures = (
        ("Building", server.builds.count(running=True), ""),
        ("Waiting", server.builds.count(running=False), ""),
        ("Hit rate", *_hit_rate(server)),
        ("Entries", sum(row[2] for row in held), human_bytes(sum(row[3] for row in held))),
    )
    body = (
        f"<h1>jitkern serve</h1><p>{counted(len(server.ops), 'op')} at "
        f"<code>{_text(url)}</code></p><p><small>{time.strftime('%H:%M:%S UTC', time.gmtime())}; "
        f"loaded again every {REFRESH} seconds</small></p>"
        f"<dl>{''.join(_FIGURE.format(name, *map(_text, rest)) for name, *rest in figures)}</dl>"
        "<h2>Building and waiting</h2>"
        f"{_table(('op', 'targets', 'state', 'since'), pending, 'Nothing is being built.')}"
        "<h2>Latest failures</h2><div class=failures>"
        f"{_table(('when', 'op', 'targets', 'error'), failures, 'None since the start.')}</div>"
        f"<h2>Use it on a machine</h2>{_use(server, url)}"
        "<h2>Entries</h2>"
        f"{_table(('op', 'target', 'entries', 'size'), entries, 'None yet.')}"
    )
    head = (
        '<meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">'
        f'<meta http-equiv=refresh content="{REFRESH}"><title>jitkern serve</title>'
        f"<style>{_STYLE}</style>"
    )
    return f"<!doctype html><html lang=en>{head}<body>{body}</body></html>\n".encode(
        "utf-8", "replace"
    )


def _hit_rate(server: Server) -> tuple[str, str]:
    """Return the share of requests for kernels that began no build, and what it is a share of."""
    requests, builds = server.metrics.served()
    rate = f"{max(0.0, 1 - builds / requests):.1%}" if requests else "none yet"
    return rate, f"{counted(requests, 'request')} for kernels, {counted(builds, 'build')}"


def _use(server: Server, url: str) -> str:
    """Return the lines of a settings file for machines that use the server."""
    lines = [f'remote = ["{url}"]']
    if server.signer:
        lines.append(f'trusted_keys = ["ed25519 {server.signer}"]')
    elif url.startswith("https:") or is_loopback(url):
        lines.append(f'trusted_remotes = ["{url}"]')
    else:
        lines.append("# entries are not signed: start the service with --key FILE")
    if server.token:
        lines.append('remote_token_file = "/etc/jitkern/token"  # a file with the token')
    return (
        "<p>In <code>/etc/jitkern/config.toml</code>, or your own "
        f"<code>~/.config/jitkern/config.toml</code>:</p><pre>{_text(chr(10).join(lines))}</pre>"
    )


def _table(head: Sequence[str], rows: Sequence[Iterable[object]], empty: str) -> str:
    if not rows:
        return f"<p>{empty}</p>"
    names = "".join(f"<th scope=col>{name}</th>" for name in head)
    cells = "".join(
        f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows[:MOST_ROWS]
    )
    more = f"<p>and {len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
    return f"<div class=table><table><thead><tr>{names}</tr></thead>{cells}</table></div>{more}"


def _text(value: object) -> str:
    """Return any text as HTML shows it."""
    return html.escape(str(value))
