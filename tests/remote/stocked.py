"""Caches with entries of several packages, without any compiler."""

from jitkern.cache.key import Key, digest_of
from jitkern.cache.manifest import Manifest
from jitkern.cache_tools import EntryFilter, chosen

CPU = "cpu-x86_64-torch2.13.0"
HOST = f"{CPU}-linux_x86_64"
GPU = "cuda-sm_90-cu130-torch2.13.0"
GPU_HOST = f"{GPU}-linux_x86_64"


def add(
    cache,
    op,
    target=CPU,
    content=b"code",
    *,
    package="",
    version="1.0",
    source="",
    size=0,
    **inputs,
):
    """Publish an entry of an op, and return it. source: what makes its key another one."""
    name = op.partition("::")[0]
    key_inputs = {"op": op, "target": target, "text": source, **inputs}
    label = op.removeprefix("jitkern::").replace("::", ".")
    key = Key(key_inputs, digest_of(key_inputs), label)
    made_by = {"name": package or name, "version": version}
    with cache.staging() as staging:
        if "record" not in inputs:
            (staging / "out.so").write_bytes(content + bytes(size))
        return cache.publish(key, staging, Manifest(key_inputs, package=made_by))


def stock(cache, package="alpha", *, ops=2, version="1.0", cpu=CPU, host=HOST):
    """Fill a cache with the entries of a package, with the record of a call, and with the launch runtime."""
    for number in range(ops):
        add(cache, f"{package}::op{number}", cpu, source=version, version=version)
    add(cache, f"{package}::op0", host, package="jitkern", version="0.1", record="call")
    add(cache, "jitkern::runtime", host, b"runtime", version="0.1")
    return cache


def everything(cache, **wanted):
    return chosen(cache, EntryFilter(**wanted))


def names(cache):
    return sorted(f"{path.parent.name}/{path.name}" for _, path in cache.places())
