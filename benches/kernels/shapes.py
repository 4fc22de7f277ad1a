"""Named shapes of 8B and 70B models, and the arguments that calls of these shapes have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benches.kernels.subject import Subject
from jitkern.calls.samples import spell, spelt
from jitkern.calls.signature import tensors_in
from jitkern.cli.parser import UsageError
from jitkern.errors import meant
from jitkern.launch.measure import copied

DTYPES = {"cuda": "bf16", "cpu": "f32"}
# Rows for each device: a CPU has an eighth of a percent of a GPU's bandwidth.
TOKENS = {"cuda": 8192, "cpu": 64}
LONG = {"cuda": 32768, "cpu": 256}
NUMBERS = {"cuda": 1 << 28, "cpu": 1 << 21}
HIDDEN = {"8B-hidden": 4096, "8B-mlp": 14336, "70B-hidden": 8192, "70B-mlp": 28672}
VOCABULARY = 128256
DEFAULTS = {
    "rows": ("row-1024", "8B-hidden", "vocabulary"),
    "pointwise": ("8B-mlp", "70B-mlp", "long"),
}
FAMILIES = {  # of ops; a function with an `op` of its own is pointwise
    "jitkern::vec_add": "pointwise",
    "jitkern::muladd": "pointwise",
    "jitkern::softmax": "rows",
    "jitkern::softmax_backward": "rows",
    "jitkern::log_softmax": "rows",
    "jitkern::log_softmax_backward": "rows",
}
# How many tensors with a number for each column such ops take after those of rows.
WEIGHTS = {
    "jitkern::rms_norm": 1,
    "jitkern::rms_norm_backward": 1,
    "jitkern::rms_norm_quantized": 1,
    "jitkern::add_rms_norm": 1,
    "jitkern::add_rms_norm_quantized": 1,
    "jitkern::layer_norm": 2,
    "jitkern::layer_norm_backward": 2,
}
FAMILIES |= dict.fromkeys(WEIGHTS, "rows")
# The calls of ops whose arguments have shapes of their own, by name: `D` is the dtype, `T` tokens.
CALLS = {
    "jitkern::rope": {
        "8B": "D[T, 32, 128], D[T, 8, 128], f32[T, 64], f32[T, 64]",
        "70B": "D[T, 64, 128], D[T, 8, 128], f32[T, 64], f32[T, 64]",
    }
}
for _name in ("silu", "gelu", "gelu_tanh", "relu2"):
    CALLS[f"jitkern::{_name}_and_mul"] = {"8B-mlp": "D[T, 28672]", "70B-mlp": "D[T, 57344]"}
    CALLS[f"jitkern::{_name}_and_mul_backward"] = {
        "8B-mlp": "D[T, 14336], D[T, 28672]",
        "70B-mlp": "D[T, 28672], D[T, 57344]",
    }
FAMILIES |= dict.fromkeys(CALLS, "pointwise")
for _name, _rest in {
    "sample": "i64[1], i64[1], 1.0, 50, 0.9", "sample_filter": "1.0, 50, 0.9", "topk": "50",
}.items():  # fmt: skip
    CALLS[f"jitkern::{_name}"] = {
        f"batch-{rows}": f"D[{rows}, {VOCABULARY}], {_rest}" for rows in (1, 8, 128)
    }
for _name in ("jitkern::cross_entropy", "jitkern::cross_entropy_with_grad"):
    CALLS[_name] = {
        "row-1024": "D[T, 1024], i64[T]",
        "row-32000": "D[T, 32000], i64[T]",
        "vocabulary": f"D[T, {VOCABULARY}], i64[T]",
    }
    FAMILIES[_name] = "rows"
CALLS["jitkern::kv_cache_append"] = {
    "70B": "D[T, 8, 128], D[T, 8, 128], D[512, 16, 8, 128], D[512, 16, 8, 128], i64[T]",
}
CALLS["jitkern::paged_decode"] = {  # of a 70B model: sequences, and tokens of each
    f"{batch}x{tokens}": f"D[{batch}, 64, 128], D[{pages}, 16, 8, 128], D[{pages}, 16, 8, 128], "
    f"i32[{batch}, {pages // batch}], i32[{batch}]"
    for batch, tokens in ((1, 8192), (1, 131072), (16, 8192), (64, 4096), (32, 16384))
    for pages in [batch * tokens // 16]
}
LINEARS = {"8B": (4096, 4096), "70B": (8192, 8192), "70B-up": (28672, 8192)}  # rows, columns
for _name, _weight in {
    "w4a16_linear": "i32[{tiles}, {pieces}, 32, 4], D[{groups}, {rows}]",
    "w8a16_linear": "i8[{rows}, {columns}], D[{rows}]",
    "int8_linear": "i8[{rows}, {columns}], D[{rows}]",
}.items():
    CALLS[f"jitkern::{_name}"] = {
        f"{size}-m{tokens}": f"D[{tokens}, {columns}], "
        + _weight.format(
            rows=rows,
            columns=columns,
            tiles=rows // 16,
            pieces=columns // 64,
            groups=columns // 128,
        )
        for size, (rows, columns) in LINEARS.items()
        for tokens in (1, 16, 32)
    }
    FAMILIES[f"jitkern::{_name}"] = "rows"
_SCALARS = {"int": 2, "SymInt": 2, "float": 0.5, "bool": True}
SAMPLES = "samples"


def _with_slots(k: Any, v: Any, k_cache: Any, v_cache: Any, slots: Any) -> tuple[Any, ...]:
    """Give each token a slot of its own, pages in random order and tokens of a page in order."""
    pages, page_size = k_cache.shape[:2]
    page = torch.randperm(pages, device=slots.device)[:, None]
    every = (page * page_size + torch.arange(page_size, device=slots.device)).flatten()
    return k, v, k_cache, v_cache, every[: slots.numel()]


def _with_pages(q: Any, k_cache: Any, v_cache: Any, table: Any, lens: Any) -> tuple[Any, ...]:
    """Give each sequence pages of its own, in random order, and as many tokens as they hold."""
    page = torch.randperm(k_cache.shape[0], device=table.device)[: table.numel()]
    lens = torch.full_like(lens, table.shape[1] * k_cache.shape[1])
    return q, k_cache, v_cache, page.view_as(table).to(torch.int32), lens


# What gives the named calls of an op integers that mean something.
_FITTED: dict[str, Callable[..., tuple[Any, ...]]] = {
    "jitkern::kv_cache_append": _with_slots,
    "jitkern::paged_decode": _with_pages,
}


@dataclass(frozen=True)
class Shape:
    """A call to measure: its name, and new random arguments for it at each `make`.

    text: the arguments as they are spelt, or "".
    """

    name: str
    make: Callable[[], tuple[Any, ...]]
    text: str = ""


def family_of(subject: Subject) -> str:
    """Return a key of DEFAULTS, or "" for an op that the tables do not know."""
    return "pointwise" if subject.pointwise else FAMILIES.get(subject.op.name, "")


def _sizes(family: str, device: str) -> dict[str, tuple[int, ...]]:
    """Return the sizes of a family's tensors by the name of the shape."""
    tokens = TOKENS[device]
    hidden: dict[str, tuple[int, ...]] = {n: (tokens, size) for n, size in HIDDEN.items()}
    if family == "pointwise":
        return {**hidden, "long": (NUMBERS[device],)}
    lengths = (256, 1024, 4096, 16384)
    rows: dict[str, tuple[int, ...]] = {f"row-{n}": (LONG[device], n) for n in lengths}
    long = {"row-65536": (2 * tokens, 65536), "vocabulary": (tokens, VOCABULARY)}
    return {**rows, **hidden, **long}


def named_shapes(subject: Subject, device: str, dtype: str) -> dict[str, Shape]:
    """Return the named shapes of a subject, in the order of their tables."""
    family = family_of(subject)
    shapes = {}
    if subject.op.name in CALLS and not subject.pointwise:
        for name, call in CALLS[subject.op.name].items():
            text = call.replace("D[", f"{dtype}[").replace("T", str(TOKENS[device]))
            shape = _spelt_shape(subject, f"{name} {text}", text, device)
            fit = _FITTED.get(subject.op.name)
            shapes[name] = _fitted(shape, fit) if fit else shape
        return shapes
    for name, sizes in (_sizes(family, device) if family else {}).items():
        weights = ["Tensor"] * WEIGHTS.get(subject.op.name, 0)
        arguments = [_argument(a, dtype, sizes) for a in _required(subject)]
        text = ", ".join([*arguments, *(_argument(w, dtype, sizes[-1:]) for w in weights)])
        full = f"{name} {'x'.join(map(str, sizes))}"
        shapes[name] = _spelt_shape(subject, full, text, device)
    return shapes


def _required(subject: Subject) -> list[str]:
    """Return the types of the arguments without a default."""
    arguments = subject.op.signature.arguments
    return [str(a.real_type) for a in arguments if not a.has_default_value()]


def _argument(kind: str, dtype: str, sizes: Sequence[int]) -> str:
    if kind == "Tensor":
        return f"{dtype}[{', '.join(map(str, sizes))}]"
    return repr(_SCALARS.get(kind))


def shapes_of(
    subject: Subject, device: str, *, dtype: str = "", names: Sequence[str] = ()
) -> list[Shape]:
    """Return the shapes to measure.

    names: of shapes, `all` for all named ones, `samples` for the op's samples, or calls spelt like
        `bf16[8192, 4096], 0.5`. By default the usual ones of the family, or the samples of an op
        that the tables do not know. Raises UsageError.
    """
    table = named_shapes(subject, device, dtype or DTYPES[device])
    usual = DEFAULTS.get(family_of(subject), ())
    default = tuple(name for name in usual if name in table) or tuple(table) or (SAMPLES,)
    shapes: list[Shape] = []
    for name in names or default:
        if name == "all" and table:
            shapes += table.values()
        elif name in table:
            shapes.append(table[name])
        elif name in (SAMPLES, "all"):
            shapes += _samples(subject, device)
        elif "[" in name:
            shapes.append(_spelt_shape(subject, name, name, device))
        else:
            known = [*table, SAMPLES, "all"]
            raise UsageError(
                f"{subject.name} has no shape `{name}`{meant(name, known)}; there are "
                f"{', '.join(known)}, and calls like `{_example(subject, device)}`"
            )
    return shapes


def given_shapes(subject: Subject, device: str, given: Mapping[str, Sequence[Any]]) -> list[Shape]:
    """Return shapes from arguments by name: a text like `bf16[64, 1000]` is a random tensor."""
    shapes = []
    for name, args in given.items():
        text = ", ".join(a if isinstance(a, str) else spell([a]) for a in args)
        shapes.append(_spelt_shape(subject, name, text, device))
    return shapes


def _example(subject: Subject, device: str) -> str:
    return ", ".join(_argument(k, DTYPES[device], (64, 1000)) for k in _required(subject))


def _spelt_shape(subject: Subject, name: str, text: str, device: str) -> Shape:
    """Return the shape of a call that a text spells. Raises UsageError."""
    (sample,) = spelt(subject.op.signature, [text])
    if sample.problem:
        raise UsageError(sample.problem)
    return Shape(name, lambda: tuple(random_like(a, device) for a in sample.args), text)


def _fitted(shape: Shape, fit: Callable[..., tuple[Any, ...]]) -> Shape:
    return Shape(shape.name, lambda: fit(*shape.make()), shape.text)


def random_like(value: Any, device: str | torch.device) -> Any:
    """Return a random tensor for a meta tensor; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return [random_like(item, device) for item in value]
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_floating_point():
        wide = value.dtype if value.itemsize > 1 else torch.float32  # 8 bits have no randn
        return torch.randn(value.shape, dtype=wide, device=device).to(value.dtype)
    high = 2 if value.dtype == torch.bool else 127
    return torch.randint(0, high, value.shape, dtype=torch.int64, device=device).to(value.dtype)


def _samples(subject: Subject, device: str) -> Iterator[Shape]:
    """Yield the op's samples that have numbers in them. Raises UsageError without any."""
    count = 0
    for number, sample in enumerate(subject.op.sample_inputs(device), 1):
        tensors = tensors_in(sample)
        if not all(tensor.numel() for tensor in tensors):
            continue
        count += 1
        name = f"sample {number} {spell(sample) or described(tensors)}"
        yield Shape(name, lambda args=sample: tuple(copied(list(args), {})), spell(sample))
    if not count:
        raise UsageError(
            f"{subject.name} has no samples to measure: add `@{subject.op.__name__}.samples`, or "
            f"name a call: --shapes '{_example(subject, device)}'"
        )


def described(tensors: Sequence[torch.Tensor]) -> str:
    """Return shapes as text, for calls that cannot be spelt."""
    return ", ".join("x".join(map(str, tensor.shape)) for tensor in tensors)
