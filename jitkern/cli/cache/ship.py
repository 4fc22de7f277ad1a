"""Carry entries to another machine, and sign them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from jitkern import cache_tools, config
from jitkern._version import __version__
from jitkern.cache_tools import bundle, signing, wheel
from jitkern.cache_tools.check import counted, human_bytes
from jitkern.cli.filters import add_filters, named, opened, wanted
from jitkern.cli.output import print_json, say
from jitkern.cli.parser import UsageError, file_to_read, take_key
from jitkern.config.settings import SYSTEM_FILE
from jitkern.errors import JitkernError

WHEEL = "jitkern-prebuilt"


def configure(commands: argparse._SubParsersAction, shared: argparse.ArgumentParser) -> None:  # type: ignore[type-arg]
    """Add the commands `pack`, `unpack`, `sign` and `keygen`."""
    text = "write entries to a bundle, or to a wheel that pip installs as a read-only layer"
    pack = commands.add_parser("pack", help=text, description=text, parents=[shared])
    add_filters(pack)
    pack.add_argument(
        "-o", "--output", type=Path, required=True, metavar="PATH",
        help="FILE.tar or FILE.tar.zst; with --wheel, a directory",
    )  # fmt: skip
    pack.add_argument("--wheel", action="store_true", help="write a wheel")
    pack.add_argument("--name", help=f"of the wheel (default: {WHEEL})")
    pack.add_argument("--version", help=f"of the wheel (default: {__version__})")
    pack.add_argument("--platform", help="of the wheel (default: that of the host code in it)")
    pack.set_defaults(run=run_pack)
    text = "add the entries of a bundle, all or none; with trusted keys, they must be signed"
    unpack = commands.add_parser("unpack", help=text, description=text, parents=[shared])
    unpack.add_argument("file", type=file_to_read, metavar="FILE", help="what `pack` wrote")
    signatures = unpack.add_mutually_exclusive_group()
    signatures.add_argument(
        "--require-signature", action="store_true", help="fail if there are no trusted keys"
    )
    signatures.add_argument(
        "--allow-unsigned",
        action="store_true",
        help="also add a bundle that no trusted key has signed",
    )
    unpack.add_argument("--dry-run", action="store_true", help="only check the bundle")
    unpack.set_defaults(run=run_unpack)
    text = "sign entries of the user root, for machines that trust the key"
    sign = commands.add_parser("sign", help=text, description=text, parents=[shared])
    add_filters(sign)
    take_key(sign, "a private key", required=True)
    sign.set_defaults(run=run_sign)
    text = "make a key to sign with: FILE, and FILE.pub for `trusted_keys` of a settings file"
    keygen = commands.add_parser("keygen", help=text, description=text, parents=[shared])
    keygen.add_argument("file", type=Path, metavar="FILE", help="where the private key goes")
    keygen.add_argument("--comment", default="", help="whose key it is")
    keygen.set_defaults(run=run_keygen)


def _check_name(path: Path) -> None:
    """Raise UsageError for what is no name of a bundle."""
    if not path.name.endswith(bundle.SUFFIXES):
        raise UsageError(f"`{path}` is no name of a bundle: expected NAME.tar or NAME.tar.zst")


def run_pack(args: argparse.Namespace) -> int:
    options = {"name": args.name, "version": args.version, "platform": args.platform}
    if not args.wheel and any(options.values()):
        raise UsageError("--name, --version and --platform are for --wheel")
    path = args.output
    if not args.wheel:
        _check_name(path)
        if not path.absolute().parent.is_dir():
            raise UsageError(f"`{path}` cannot be written: there is no folder {path.parent}")
    cache = opened()
    chosen = named(args, cache_tools.chosen(cache, wanted(args)))
    packed = len(chosen)
    if args.wheel:
        path = wheel.pack_wheel(
            cache, chosen, path,
            name=args.name or WHEEL, version=args.version or __version__,
            platform=args.platform or "",
        )  # fmt: skip
    else:
        packed = bundle.pack(cache, chosen, path)
    size = path.stat().st_size
    print(f"{counted(packed, 'entry')} packed, {human_bytes(size)}", file=sys.stderr)
    if args.json:
        print_json(path=str(path), entries=packed, bytes=size)
    else:
        print(path)
    return 0


def run_unpack(args: argparse.Namespace) -> int:
    _check_name(args.file)
    keys = () if args.allow_unsigned else config.current().trusted_keys
    if args.require_signature and not keys:
        raise JitkernError(
            "--require-signature needs a trusted key, and no settings file has `trusted_keys`: add "
            "the line of the signer's .pub file to `trusted_keys` in "
            f"~/.config/jitkern/config.toml or {SYSTEM_FILE}"
        )
    done = bundle.unpack(opened(new=True), args.file, keys=keys, dry_run=args.dry_run)
    print(
        f"{counted(done.new, 'entry')} {'would be ' if args.dry_run else ''}unpacked, "
        f"{human_bytes(done.bytes)}; {done.present} were already there",
        file=sys.stderr,
    )
    if args.json:
        print_json(**done._asdict(), signed=bool(keys), dry_run=args.dry_run)
    return 0


def run_sign(args: argparse.Namespace) -> int:
    cache = opened()
    chosen = named(args, cache_tools.chosen(cache, wanted(args)))
    signed = signing.sign(cache, chosen, args.key)
    if not signed:
        say(f"no entry of {cache.root} matches the options: nothing to sign")
        return 1
    print(f"{counted(signed, 'entry')} of {cache.root} signed", file=sys.stderr)
    if args.json:
        print_json(signed=signed, path=str(cache.root))
    return 0


def run_keygen(args: argparse.Namespace) -> int:
    line = signing.keygen(args.file, args.comment)
    print_json(key=line, path=str(args.file)) if args.json else print(line)
    print(
        f"{args.file} is the private key: keep it secret. To trust its signatures, add the line "
        "above to `trusted_keys` of a settings file",
        file=sys.stderr,
    )
    return 0
