"""The benches run here and print the JSON that is promised; what they measure is not judged."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import needs_triton

from jitkern.compilers.cuda import toolkit

REPOSITORY = Path(__file__).parent.parent
pytestmark = pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")


def run(
    cache_dir: Path, module: str, *arguments: str, code: int = 0
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "JITKERN_CACHE_DIR": str(cache_dir)}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


def printed(cache_dir: Path, module: str, *arguments: str, code: int = 0) -> dict[str, Any]:
    """The JSON object on the last line, with what every bench prints checked."""
    output: dict[str, Any] = json.loads(
        run(cache_dir, module, *arguments, code=code).stdout.splitlines()[-1]
    )
    assert output["schema"] == 1
    assert output["device"] and output["commit"]
    assert {"python", "torch", "cuda", "triton", "gcc", "jitkern"} <= set(output["versions"])
    return output


def positive(found: Any) -> bool:
    """Whether every number of some fields is positive."""
    return all(map(positive, found.values())) if isinstance(found, dict) else found > 0


def each(*outer: str, of: tuple[str, ...]) -> set[str]:
    return {f"{one}.{other}" for one in outer for other in of}


HELD = {
    *each("jitkern.cpp", "jitkern.differentiable", of=("held", "public")),
    "aten.held",
    "torch.public",
    "custom_op",
}
CLOCKS = each("cold", "edit", of=("seconds", "processor"))
SERVED = {f"{what}, {count} connections" for what in ("bundle", "index") for count in (1, 2)}
DROP_INS = {"torch.stable", "jitkern.stable"}
OF_CACHES = {"lookup", "ls", "stats", "verify", "prune"}
needs_nvrtc = pytest.mark.skipif(
    not toolkit.nvrtc_libraries(), reason="needs NVRTC: pip install jitkern[cuda]"
)
BENCHES = [  # module, its options, and the names in fields of its output, all of whose numbers are positive
    ("call_overhead", "--device cpu --rounds 2", {"us": HELD, "min_us": HELD, "ratio": {"held", "public"}}),
    ("rebuild", "--device cpu --rounds 1", {"ratio": CLOCKS, "medians": CLOCKS}),
    # jitkern.cuda cannot run on the CPU; without load_inline there is nothing to compare with.
    ("first_call", "--device cpu --kinds jitkern.cpp,jitkern.cuda --rounds 1",
     {"cold": {"jitkern.cpp"}, "warm": {"jitkern.cpp"}, "ratio": set()}),
    ("cache_scale", "--entries 40 --rounds 1", {"ratio": OF_CACHES, "us": None, "seconds": None, "entries": {"few", "many"}}),
    pytest.param("prewarm", "--ops vec_add --jobs 1 2 --rounds 1",
                 {"ratio": {"1", "2"}, "per_second": {"1", "2"}, "second_run": None}, marks=needs_nvrtc),
    ("drop_in", "--device cpu --kinds stable --rounds 1",
     {"cold": DROP_INS, "warm": DROP_INS, "ratio": {"cold.stable", "warm.stable"}}),
    pytest.param("triton_compile", "--device cpu --rounds 1",
                 {"ratio": {"one", "forty", "package"}}, marks=needs_triton),
    ("serve", "--rounds 1 --requests 20 --connections 1 2",
     {"seconds": {"build", "again", "alike", "60 at once"}, "per_second": SERVED}),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("name", "options", "fields"), BENCHES)
def test_a_bench_prints_what_is_promised(
    name: str, options: str, fields: dict[str, set[str] | None], cache_dir: Path
) -> None:
    output = printed(cache_dir, f"benches.{name}", *options.split(), "--json")
    for field, names in fields.items():
        assert names in (None, set(output[field])), field
        assert positive(output[field]), field
    assert (
        name not in ("first_call", "cache_scale", "prewarm", "drop_in", "triton_compile")
        or not cache_dir.exists()
    ), "cold is only cold in a cache of its own"


@pytest.mark.long
def test_attention_reports_each_density_and_direction(cache_dir: Path) -> None:
    shape = ("--length", "300", "--heads", "2", "--key-heads", "1", "--head-size", "32")
    options = ("--device", "cpu", "--json", "--rounds", "1", "--densities", "1,0.3")
    output = printed(cache_dir, "benches.attention", *options, *shape)
    assert [row["direction"] for row in output["results"]] == ["forward", "both"] * 2
    for row in output["results"]:
        assert set(row["us"]) == {"jitkern", "dense", "sdpa", "mask"} and positive(row["us"])
        assert row["of_bound"] > 0


@pytest.mark.long
def test_first_call_names_a_kind_that_fails_and_leaves_it_out(
    cache_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    arguments = ("--device", "cpu", "--kinds", "jitkern.cpp", "--rounds", "1", "--json")
    done = run(cache_dir, "benches.first_call", *arguments, code=1)
    output = json.loads(done.stdout.splitlines()[-1])
    assert output["cold"] == output["warm"] == {}
    assert "jitkern.cpp is left out" in done.stderr and "no-such-compiler" in done.stderr


@pytest.mark.long
def test_kernels_compares_an_op_with_what_torch_compile_makes(
    cache_dir: Path, tmp_path: Path
) -> None:
    call = "f32[64, 100], f32[64, 100]"
    options = ("--device", "cpu", "--shapes", call, "--rounds", "2", "--plot", str(tmp_path))
    output = printed(cache_dir, "benches.kernels", "vec_add", *options, "--json")
    (op,) = output["ops"]
    rows = {row["who"]: row for row in op["rows"]}
    assert list(rows) == ["jitkern", "eager", "torch.compile", "torch.compile-dynamic"]
    assert all(row["wall_us"] > 0 and row["gbs"] > 0 and not row["note"] for row in rows.values())
    assert rows["jitkern"]["first_call_s"] > 0 and rows["torch.compile"]["first_call_s"] > 0
    assert op["left_out"] == {"cupy": "its kernels are for CUDA devices"}


@pytest.mark.long
def test_fleet_compares_a_compile_with_remotes_and_a_service(cache_dir: Path) -> None:
    output = printed(cache_dir, "benches.fleet", "--json", "--rounds", "1", "--delay", "0.001")
    ways = {"local compile", "warm", "bundles", "service", "service again"}
    assert set(output["seconds"]) == set(output["over_warm"]) == ways
    for name, fields in output["seconds"].items():
        assert 0 < fields["first"] <= fields["served"]
        assert (fields["compiles"] > 0) == (name == "local compile")
        assert (fields["requests"] > 0) == (name not in ("local compile", "warm"))
    assert output["entries"] > 10


@pytest.mark.long
def test_the_page_shows_what_the_simulation_of_a_fleet_prints(cache_dir: Path) -> None:
    page = (REPOSITORY / "docs" / "performance.md").read_text()
    table = page.partition("| a host fetches |")[2].partition("\n\n")[0].splitlines()[2:]
    done = run(cache_dir, "benches.fleet_simulation", "--json")
    outcomes = json.loads(done.stdout.splitlines()[-1])["outcomes"]
    expected = {
        name: f"{o['requests'] / 1e6:.2f} | {o['median_s']:.1f} s | {o['p99_s']:.1f} s | "
        f"{o['compiles']:,} | {o['gigabytes']:.1f} |"
        for name, o in outcomes.items()
    }
    rows = [row.removeprefix("| ").partition(" | ") for row in table]
    # Those that fetch each entry start over 30 s, and do not say so in the output.
    told = "each entry, starts over 30 s"
    found = {name.replace(told, "each entry"): row for name, _, row in rows}
    assert found == expected
