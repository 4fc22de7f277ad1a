"""Names of entries fit into bundles, whatever the op, its variant and the target; longer ones are left out."""

import pytest

import jitkern.ops
from jitkern.cache.key import LONGEST_PLACE, Key, digest_of, label_of
from jitkern.cache.layout import is_entry_name
from jitkern.cache.manifest import NAME, Manifest
from jitkern.cache_tools import bundle, chosen, ustar
from jitkern.cache_tools.bundle import BundleError
from jitkern.cache_tools.listing import EntryFilter
from jitkern.files import signature
from jitkern.op.all_ops import all_ops
from jitkern.op.needed_kernels import needs_of
from jitkern.target import Target

GPU = Target("cuda", "sm_90", "130", "2.13.0")
LONGEST = Target(  # of those that there are
    "cuda", "sm_103a", "130", "2.9.0a0+145a3a7bda.nv25.10", "linux_aarch64", "cxx11_glibc2.39_cp312"
)  # fmt: skip
FILES = (
    NAME,
    signature.NAME,
    f"{'f' * 80}.01234567.so",
)  # the longest that a compiler of ours writes


def name_of(*label):
    return f"{label_of(*label)}-{'0' * 16}"


@pytest.mark.parametrize("end", ["", ".01234567"])
@pytest.mark.parametrize("op", ["a::b", f"jitkern::{'o' * 200}", f"{'n' * 90}::o"])
@pytest.mark.parametrize("target", [str(GPU), str(LONGEST)])
def test_each_file_of_the_longest_entry_fits(target, op, end):
    assert Target.parse(target) in (GPU, LONGEST)
    name = name_of(op, "v" * 200, target, end)
    assert len(f"{target}/{name}") == LONGEST_PLACE
    assert is_entry_name(name)
    assert name.rpartition("-")[0].endswith(end)
    for file in FILES:
        ustar.header_of(f"{target}/{name}/{file}", 1)
    with pytest.raises(BundleError):
        ustar.header_of(f"{target}/x{name}/{file}", 1)


@pytest.mark.parametrize("length", range(LONGEST_PLACE))
def test_a_label_begins_as_that_of_its_op_wherever_it_is_cut(length):
    target = "t" * length
    for op in ("a::b.-.c", f"a::{'b.' * 60}"):
        label = label_of(op, "choice.function", target)
        assert label.startswith(label_of(op, "choice", target))
        assert label.startswith(label_of(op, "", target))
        assert is_entry_name(f"{label}-{'0' * 16}")


def test_short_names_are_what_they_were():
    assert label_of("mine::f", "f32.N2", str(GPU)) == "mine.f.f32.N2"


@pytest.mark.long
def test_the_names_of_all_shipped_kernels_fit():
    assert jitkern.ops
    labels = [
        (name, variant.label)
        for name, op in all_ops().items()
        if name.startswith("jitkern::")
        for device, target in (("cuda", GPU), ("cpu", Target.current("cpu")))
        for source in op.sources.get(device, ())
        for variant in needs_of(op, source, device, target).variants
    ]
    assert len(labels) > 500
    for target in map(str, (GPU, LONGEST)):
        for op, label in labels:
            for file in FILES:
                ustar.header_of(f"{target}/{name_of(op, label, target)}/{file}", 1)


@pytest.fixture
def long(cache):
    """An entry with a longer name than there are now, as an early jitkern gave it."""
    inputs = {"op": "test::scale", "target": str(GPU)}
    key = Key(inputs, digest_of(inputs), "x" * LONGEST_PLACE)
    with cache.staging() as staging:
        (staging / "out.so").write_bytes(b"code")
        return cache.publish(key, staging, Manifest(inputs))


def test_a_bundle_tells_of_an_entry_whose_name_is_too_long(cache, long, other, tmp_path, caplog):
    assert bundle.pack(cache, chosen(cache, EntryFilter()), tmp_path / "b.tar") == 3
    assert f"{long.path} is left out: the name `{GPU}/xxx" in caplog.text
    assert len(caplog.records) == 1
    assert bundle.unpack(other, tmp_path / "b.tar").new == 3
    with pytest.raises(BundleError, match="nothing to pack"):
        bundle.pack(cache, [long], tmp_path / "c.tar")


def test_an_entry_with_a_long_name_is_read_by_that_name_alone(cache, long):
    assert cache.look_up(long.path.parent.name, long.path.name).entry.read("out.so") == b"code"
    inputs = long.manifest.inputs
    label = label_of("test::scale", "x" * LONGEST_PLACE, str(GPU))
    assert cache.find(Key(inputs, digest_of(inputs), label)) is None
