"""Prints the keys and the names of records of all that jitkern keeps, as JSON; compiles nothing."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import Any

import jitkern_chains  # noqa: F401  whose ops are listed
import keyed_ops
import keyed_triton
import torch
from uncompiled import UncompiledKernels

import jitkern.ops
from jitkern import jit
from jitkern.cache import records
from jitkern.calls.signature import class_of
from jitkern.dropin import api, extension, memo
from jitkern.launch import autotune
from jitkern.launch.autotune import Choice
from jitkern.launch.symbols import Unsupported
from jitkern.op import compile_cache_key
from jitkern.op.all_ops import all_ops
from jitkern.op.needed_kernels import digest_of, needs_of
from jitkern.runtime import records as launch_records
from jitkern.runtime.records import CallClass
from jitkern.source.kinds import ITSELF, Variant
from jitkern.target import Target
from jitkern.trace.trace import trace
from jitkern.trace.tracer import metadata_of

HERE = Target.current("cpu")
TARGETS = {"cpu": HERE, "cuda": Target.parse(f"cuda-sm_90-cu130-torch{HERE.torch}")}
noted: list[str] = []  # names of the records that were asked for


def noting(*args: Any) -> Any:
    key = RECORD_KEY(*args)
    noted.append(key.name)
    return key


RECORD_KEY, records.record_key = records.record_key, noting


class Kernels(UncompiledKernels):
    """Kernels of which nothing but the key is known."""

    def chosen(self, question):
        kept = autotune.published(self.op, self.source, self.target, "a GPU", question)
        return kept or Choice(question.configs[-1], "a GPU")

    def reference_to(self, variant):
        return jit.key_of(variant, self.target).reference


def keys_of(op, source, target):
    """Yield the keys of an op's kernels for a target, and the names of its launch records."""
    needs = needs_of(op, source, target.device, target)
    yield from needs.problems
    yield from (jit.key_of(variant, target).name for variant in needs.variants)
    if source.runs == ITSELF:
        return
    device = torch.device("cuda:0" if target.device == "cuda" else "cpu")
    function = op.launch_function(source, target.device)
    kernels = Kernels(op.name, source, target, "", {})
    for call in needs.calls:
        args, kwargs = op.signature.complete(*op.signature.split(call))
        given = metadata_of(op.signature.in_order(args, kwargs))
        yield digest_of(op, source, target.device, call)
        try:
            traced = trace(op.signature, function, given, frozenset(kwargs), device, kernels)
        except Unsupported as e:
            yield f"no trace: {e}"
            continue
        calls = CallClass(op.signature, function, source, target, device, class_of(given))
        kept = launch_records.keep(calls, traced, launch_records.reader())
        yield kept[0].path.name if kept else "no record"


def drop_ins():
    """Yield the keys of drop-ins, and of their shortcuts."""
    texts = ["int f() { return 1; }", '#include "a.h"\nint f() { return A; }']
    for text in texts:
        for flags in ([], ["-O3", "-DA", "-DB"]):
            call = api.call_of(
                "keyed", None, flags, flags, [], None,
                files=["main.cpp"], texts=[text], places=[], output="module", python=True,
            )  # fmt: skip
            source = extension.source_of(call)
            yield jit.key_of(Variant("inline::keyed", source), extension.target_of(source)).name
            yield getattr(memo.shortcut_key(call), "name", "no shortcut")


def raw_kernels():
    """Yield the keys of kernels that are called without an op."""
    x = torch.ones(128)
    tuned = jitkern.triton_kernel(keyed_triton.mapped)
    act, mode = keyed_triton.relu, keyed_triton.Mode.EXACT
    variants = tuned.variants(x, x, 128, KIND=torch.float16, PAIR=(1,), ACT=act, MODE=mode)
    variants.append(jitkern.cuda_kernel(text=keyed_ops.CU, name="scaled", flags=["-DA"]).variant)
    yield from (jit.key_of(variant, TARGETS["cuda"]).name for variant in variants)


def digest_for_torch(op):
    """Return the digest of an op in the keys of Torch's compile caches."""
    digest = compile_cache_key.digest({op.name: op})
    again = compile_cache_key.digest({op.name: op})
    return digest if digest == again else "another one each time"


def main() -> None:
    logging.disable()
    listed = {"drop-ins": [*drop_ins()], "raw": [*raw_kernels()]}
    for name, op in sorted(all_ops().items()):
        listed[name] = [digest_for_torch(op)]
        for device, target in TARGETS.items():
            for source in op.sources.get(device, ()):
                listed[f"{name} {device} {source.kind}"] = [*keys_of(op, source, target)]
    listed["asked for"] = noted
    Path(sys.argv[1]).write_text(json.dumps(listed))


main()
