"""Serve the cache over HTTP, and build what is missing from the packages that are installed here.

Machines that set JITKERN_REMOTE to the URL get their kernels from it, and need no compiler. A
request names an op and describes its arguments; no source, flag or path of a client is compiled.
SIGTERM and Ctrl-C let builds end, and then end the service.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import signal
import sys
from pathlib import Path

from jitkern import config, service
from jitkern.cache_tools.check import counted
from jitkern.cli.choose import choose_ops, take_ops
from jitkern.cli.output import YELLOW, print_json, say
from jitkern.cli.parser import at_least_one, take_key
from jitkern.compilers import parallelism
from jitkern.errors import JitkernError, SettingError
from jitkern.remote.store import is_loopback

DEFAULT = "127.0.0.1:8757"
_SIGNALS = {signal.SIGTERM, signal.SIGINT}
_LONGEST_TOKEN = 4096


def configure(parser: argparse.ArgumentParser, _: argparse.ArgumentParser) -> None:
    take_ops(parser, metavar="PACKAGE", required=True)
    parser.add_argument(
        "--listen", type=_address, default=_address(DEFAULT), metavar="HOST:PORT",
        help=f"where to listen (default: {DEFAULT}); port 0 takes a free one",
    )  # fmt: skip
    parser.add_argument(
        "--jobs",
        type=at_least_one,
        metavar="N",
        help="builds at once (default: from cores and free memory)",
    )
    take_key(parser, "sign entries with this key")
    parser.add_argument(
        "--token-file", type=Path, metavar="FILE",
        help="serve only clients that send the token in this file",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    ops, broken, _ = choose_ops(args.what)
    if broken:
        raise JitkernError(f"not serving, since {', '.join(broken)} cannot be imported")
    token = _token(args.token_file)
    jobs = args.jobs or parallelism.limit()
    try:
        room, application = service.server, service.app.Application
    except ImportError as e:
        raise JitkernError(f'`jitkern serve` needs {e.name}: pip install "jitkern[serve]"') from e
    show = functools.partial(print, file=sys.stderr, flush=True)
    with contextlib.ExitStack() as ending:
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # in all threads of the server
        ending.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        try:
            server = room.Server(
                ops, args.listen, jobs=jobs, key=args.key, token=token,
                tell=show if args.level > 0 else lambda _: None,
            )  # fmt: skip
        except OSError as e:
            host, port = args.listen
            raise JitkernError(
                f"cannot listen on {host}:{port}: {e.strerror or e}; name another address by "
                "--listen"
            ) from e
        server.start(application(server))
        ending.callback(server.drain)
        # First of all: a second signal ends at once.
        ending.callback(signal.pthread_sigmask, signal.SIG_SETMASK, before)
        _announce(server, args, jobs)
        got = signal.sigwait(_SIGNALS)
    if args.level >= 0:
        print(f"{signal.Signals(got).name}: stopped after its builds", file=sys.stderr)
    return 0


def _announce(server: service.server.Server, args: argparse.Namespace, jobs: int) -> None:
    ops, root = [*server.ops], config.current().cache_dir
    if args.json:
        print_json(url=server.url, ops=ops, path=str(root), jobs=jobs)
    else:
        print(
            f"serving {counted(len(ops), 'op')} at {server.url}, out of {root}, "
            f"{counted(jobs, 'build')} at once" + f": {', '.join(ops)}" * (args.level > 0)
        )
    sys.stdout.flush()
    if args.level < 0:
        return
    if not args.key:
        say(
            "entries are not signed: machines use them only if `trusted_remotes` in their settings "
            "file names this service; --key FILE signs them",
            code=YELLOW,
        )
    if not server.token and not is_loopback(server.url):
        say(
            f"anyone who reaches {server.url} can read entries and start builds: "
            "--token-file FILE requires a token",
            code=YELLOW,
        )


def _token(path: Path | None) -> bytes:
    """Return the token in a file. Raises SettingError for a file without a usable one."""
    if path is None:
        return b""
    try:
        with path.open("rb") as file:
            token = file.read(_LONGEST_TOKEN).strip()
    except OSError as e:
        raise SettingError(f"--token-file {path} cannot be read: {e.strerror}") from e
    text = token.decode("ascii", "replace")
    if not text or not text.isascii() or not text.isprintable() or " " in text:
        raise SettingError(f"--token-file {path} holds no token: expected one line of ASCII")
    return token


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise argparse.ArgumentTypeError(f"`{text}` is not HOST:PORT, as {DEFAULT} is")
    return host, int(port)
