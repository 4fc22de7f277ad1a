"""Bundles written by hand."""

import tarfile

from jitkern.cache_tools import bundle, chosen
from jitkern.cache_tools.bundle import BLOCK
from jitkern.cache_tools.listing import EntryFilter

END = bytes(2 * BLOCK)
SUFFIXES = (".tar", ".tar.zst")


def packed(cache, tmp_path, suffix=".tar"):
    path = tmp_path / f"packed{suffix}"
    bundle.pack(cache, chosen(cache, EntryFilter()), path)
    data = path.read_bytes()
    path.unlink()
    return data


def listing(directory):
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def shipped(cache):
    """The files of every entry but the logs."""
    return {
        str(file.relative_to(cache.root)): file.read_bytes()
        for path in cache.paths()
        for file in path.iterdir()
        if file.name != "compile.log"
    }


def members(data):
    """[name, header, padded content] of each member, without the end."""
    found, at = [], 0
    while any(data[at : at + BLOCK]):
        info = tarfile.TarInfo.frombuf(data[at : at + BLOCK], "ascii", "strict")
        end = at + BLOCK + -(-info.size // BLOCK) * BLOCK
        found.append([info.name, data[at : at + BLOCK], data[at + BLOCK : end]])
        at = end
    return found


def joined(found):
    return b"".join(header + content for _, header, content in found) + END


def member(name, data, **fields):
    """One as tarfile makes it."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    made = fields.pop("format", tarfile.USTAR_FORMAT)
    for field, value in fields.items():
        setattr(info, field, value)
    header = info.tobuf(made)
    return [name, header, data + bytes(-len(data) % BLOCK)]


def archive(entries):
    """A bundle of {(target, folder): {file: bytes}}, whatever is wrong with them."""
    return [
        member(f"{target}/{folder}/{file}", data)
        for (target, folder), files in sorted(entries.items())
        for file, data in files.items()
    ]


def fixed(header):
    """A header with its checksum put right."""
    header = header[:148] + b" " * 8 + header[156:]
    return header[:148] + b"%06o\0 " % sum(header) + header[156:]
