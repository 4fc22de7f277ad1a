"""The page for people at `/`: what is built, what failed, what lies here, and how to use it.

Names of ops, lines of compilers and the host are texts of others: all are escaped, and the answer
forbids everything but its own style.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import string
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from jitkern.cache_tools.check import counted, headline, human_age, human_bytes
from jitkern.remote.store import is_loopback
from jitkern.service.server import Server

MOST_ROWS = 200
_PAGE = Path(__file__).with_name("page.html").read_text()
_STYLE = re.findall("<style>(.*)</style>", _PAGE, re.DOTALL)[0]
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
    requests, builds = server.metrics.served()
    pending = [
        (b.request.op, ", ".join(b.request.targets),
         "building" if b.future.running() else "waiting", f"for {human_age(now - b.since)}")
        for b in server.builds.pending()
    ]  # fmt: skip
    failures = [
        (f"{human_age(now - b.since)} ago", b.request.op, ", ".join(b.request.targets),
         headline(b.future.result().reason)[0])
        for b in server.builds.failed()
    ]  # fmt: skip
    entries = [(op, target, counted(n, "entry"), human_bytes(size)) for op, target, n, size in held]
    texts = {
        "ops": counted(len(server.ops), "op"),
        "url": url,
        "now": time.strftime("%H:%M:%S UTC", time.gmtime()),
        "building": server.builds.count(running=True),
        "waiting": server.builds.count(running=False),
        "rate": f"{max(0.0, 1 - builds / requests):.1%}" if requests else "none yet",
        "requests": counted(requests, "request"),
        "builds": counted(builds, "build"),
        "entries": sum(row[2] for row in held),
        "bytes": human_bytes(sum(row[3] for row in held)),
        "settings": _settings(server, url),
    }
    text = string.Template(_PAGE).substitute(
        {name: html.escape(str(text)) for name, text in texts.items()},
        pending=_table(("op", "targets", "state", "since"), pending, "Nothing is being built."),
        failures=_table(("when", "op", "targets", "error"), failures, "None since the start."),
        held=_table(("op", "target", "entries", "size"), entries, "None yet."),
    )
    return text.encode("utf-8", "replace")


def _settings(server: Server, url: str) -> str:
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
    return "\n".join(lines)


def _table(head: Sequence[str], rows: Sequence[Iterable[object]], empty: str) -> str:
    if not rows:
        return f"<p>{empty}</p>"
    names = "".join(f"<th scope=col>{name}</th>" for name in head)
    cells = "".join(
        f"<tr>{''.join(f'<td>{html.escape(str(cell))}</td>' for cell in row)}</tr>"
        for row in rows[:MOST_ROWS]
    )
    more = f"<p>and {len(rows) - MOST_ROWS} more</p>" if len(rows) > MOST_ROWS else ""
    return f"<div class=table><table><thead><tr>{names}</tr></thead>{cells}</table></div>{more}"
