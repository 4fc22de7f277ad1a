"""One first call of an op in this process, over Torch and the CUDA context: prints its seconds.

`benches.kernels` starts it as `python -m benches.one_kernel_call WHO SPEC DEVICE CALL`, with empty
caches. WHO is jitkern, whose import and declaration are timed too, or a peer of torch.compile,
which compiles the op's reference: to find that is not timed. CALL is JSON, the positional arguments
and those by name. Nothing of jitkern is imported here before the clock starts.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from typing import Any

import torch


def main() -> None:
    """Make the call that the command line names."""
    who, spec, device, call = sys.argv[1:]
    positional, by_name = json.loads(call)
    args = [_argument(value, device) for value in positional]
    kwargs = {name: _argument(value, device) for name, value in by_name.items()}
    torch.zeros(1, device=device)  # on a GPU: creates the context
    _wait(device)
    started = time.perf_counter()
    function = _function(spec)
    if who != "jitkern":
        reference = getattr(function, "op", function).declaration.reference
        started = time.perf_counter()
        function = torch.compile(reference, dynamic=who.endswith("dynamic"))
    function(*args, **kwargs)
    _wait(device)
    print(json.dumps({"seconds": time.perf_counter() - started}))


def _argument(value: Any, device: str) -> Any:
    if not isinstance(value, dict):
        return value
    return torch.ones(value["shape"], dtype=getattr(torch, value["dtype"]), device=device)


def _function(spec: str) -> Any:
    sys.path.insert(0, "")
    module, _, attribute = spec.partition(":")
    value: Any = importlib.import_module(module)
    for part in attribute.split("."):
        value = getattr(value, part)
    return value


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
