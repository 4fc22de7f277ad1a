"""Choosing among the configurations of `@triton.autotune`, once per device model.

The choice is measured on the device, on copies of the arguments, and published like any artifact:
keyed by the source, the configurations, the values of the autotuner's key arguments, the dtypes and
the device's name. A process that finds it measures nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jitkern import config, jit
from jitkern.closure import closure_of
from jitkern.errors import CacheError, CompileError, LaunchError
from jitkern.kernel import Source, Variant
from jitkern.key import Key, canonical, make_key
from jitkern.launch.arguments import SHORT
from jitkern.launch.symbols import concrete
from jitkern.launch.triton import Config, Function
from jitkern.manifest import LOG, Manifest
from jitkern.target import Target

WARM_UPS, REPEATS = 3, 10
_log = logging.getLogger(__name__)


def situation_of(declared: Function, named: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """What a choice is made for: the key arguments' values (guarded, in a trace) and the dtypes."""
    values = [(name, concrete(named[name])) for name in declared.key if name in named]
    dtypes = [
        (name, SHORT.get(value.dtype, ""))
        for name, value in named.items()
        if isinstance(value, torch.Tensor)
    ]
    return (
        *((name, value) for name, value in values if not isinstance(value, torch.Tensor)),
        *dtypes,
    )


def choose(
    op: str,
    source: Source,
    function: str,
    target: Target,
    device: torch.device,
    configs: Sequence[Config],
    situation: tuple[tuple[str, Any], ...],
    run: Callable[[Config], Callable[[], None]],
) -> Config:
    """The configuration to use: the one published for this device model, else the quickest now.

    run: makes a launch of a configuration on copies of the arguments. Raises LaunchError where none
    works; where nothing may be compiled or measured, takes the first, and says so.
    """
    key = _key(op, source, function, target, device, configs, situation)
    cache = jit.open_cache()
    if entry := cache.find(key):
        chosen: int = json.loads(entry.read("choice.json"))["choice"]
        if 0 <= chosen < len(configs):
            return configs[chosen]
    if config.current().compile != "auto" or jit.capturing():
        _log.warning(
            "%s: `%s` is not tuned for %s, and takes its first configuration: call it once where "
            "it may compile", op, function, dict(situation),
        )  # fmt: skip
        return configs[0]
    times = [_milliseconds(run, candidate, device) for candidate in configs]
    best = min(range(len(configs)), key=times.__getitem__)
    if times[best] == float("inf"):
        raise LaunchError(f"{op}: none of the {len(configs)} configurations of `{function}` runs")
    with contextlib.suppress(CacheError), cache.staging() as staging:
        report = {
            "choice": best,
            "configs": [list(c) for c in configs],
            "milliseconds": [t if t < 1e9 else None for t in times],
        }
        (staging / "choice.json").write_bytes(canonical(report))
        (staging / LOG).write_text(f"measured on {torch.cuda.get_device_name(device)}\n")
        cache.publish(
            key, staging, Manifest(key.inputs, compiler={"name": "autotune", "version": "1"})
        )
    return configs[best]


def _key(
    op: str, source: Source, function: str, target: Target, device: torch.device,
    configs: Sequence[Config], situation: tuple[tuple[str, Any], ...],
) -> Key:  # fmt: skip
    flags = [torch.cuda.get_device_name(device), canonical([list(c) for c in configs]).decode()]
    flags += [f"{name}={value}" for name, value in situation]
    variant = Variant(op, source, f"{function}.choice")
    return make_key(variant, target.for_device_code(), tuple(flags), closure_of(source))


def _milliseconds(
    run: Callable[[Config], Callable[[], None]], candidate: Config, device: torch.device
) -> float:
    """The median of a few launches; infinite for a configuration that this device cannot run."""
    try:
        launch = run(candidate)
        for _ in range(WARM_UPS):
            launch()
    except (LaunchError, CompileError) as e:
        _log.info("configuration %s is left out: %s", candidate, e)
        return float("inf")
    times = []
    with torch.cuda.device(device):
        for _ in range(REPEATS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            launch()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return float(sorted(times)[len(times) // 2])
