"""The benches run here and print the JSON that is promised; what they measure is not judged."""

from __future__ import annotations

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


def positive(numbers: dict[str, float]) -> bool:
    return bool(numbers) and all(number > 0 for number in numbers.values())


@pytest.mark.long
def test_call_overhead_reports_every_contender_of_the_cpu(cache_dir: Path) -> None:
    output = printed(
        cache_dir, "benches.call_overhead", "--device", "cpu", "--json", "--rounds", "2"
    )
    ours = {
        f"{kind}.{form}"
        for kind in ("jitkern.cpp", "jitkern.differentiable")
        for form in ("held", "public")
    }
    theirs = {"aten.held", "torch.public", "custom_op"}
    assert set(output["us"]) == set(output["min_us"]) == ours | theirs
    assert positive(output["us"]) and positive(output["min_us"])
    assert all(output["min_us"][name] <= output["us"][name] for name in output["us"])
    assert set(output["ratio"]) == {"held", "public"}
    for ratios in output["ratio"].values():
        assert set(ratios) == {"jitkern.cpp", "jitkern.differentiable"} and positive(ratios)


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
def test_rebuild_reports_both_builds_of_both(cache_dir: Path) -> None:
    output = printed(cache_dir, "benches.rebuild", "--device", "cpu", "--json", "--rounds", "1")
    clocks = {f"{what}.{clock}" for what in ("cold", "edit") for clock in ("seconds", "processor")}
    assert output["ratio"].keys() == output["medians"].keys() == clocks
    assert all(positive(times) and len(times) == 2 for times in output["medians"].values())


@pytest.mark.long
def test_first_call_reports_the_kinds_asked_for(cache_dir: Path) -> None:
    kinds = ("--kinds", "jitkern.cpp,jitkern.cuda", "--rounds", "1")
    output = printed(cache_dir, "benches.first_call", "--device", "cpu", "--json", *kinds)
    assert set(output["cold"]) == set(output["warm"]) == {"jitkern.cpp"}, (
        "jitkern.cuda cannot run on the CPU"
    )
    assert positive(output["cold"]) and positive(output["warm"])
    assert output["ratio"] == {}, "without load_inline there is nothing to compare with"
    assert output["import_ops_s"] > 0
    assert not cache_dir.exists(), "cold is only cold in a cache of its own"


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
def test_first_call_refuses_a_kind_it_does_not_know(cache_dir: Path) -> None:
    done = run(
        cache_dir, "benches.first_call", "--device", "cpu", "--kinds", "jitkern.fortran", code=2
    )
    assert "there is no kind `jitkern.fortran`" in done.stderr


@pytest.mark.long
def test_cache_scale_reports_a_lookup_and_every_command(cache_dir: Path) -> None:
    output = printed(cache_dir, "benches.cache_scale", "--entries", "40", "--json", "--rounds", "1")
    assert output["entries"] == {"few": 10, "many": 40}
    assert set(output["ratio"]) == {"lookup", "ls", "stats", "verify", "prune"}
    assert positive(output["ratio"]) and positive(output["us"])
    assert all(positive(took) for took in output["seconds"].values())
    assert not cache_dir.exists()


@pytest.mark.long
@pytest.mark.skipif(not toolkit.nvrtc_libraries(), reason="needs NVRTC: pip install jitkern[cuda]")
def test_prewarm_reports_throughput_for_each_count_of_jobs(cache_dir: Path) -> None:
    arguments = ("--ops", "vec_add", "--jobs", "1", "2", "--rounds", "1", "--json")
    output = printed(cache_dir, "benches.prewarm", *arguments)
    assert set(output["ratio"]) == set(output["per_second"]) == {"1", "2"}
    assert output["ratio"]["1"] == 1
    assert output["artifacts"] > 3
    assert len(output["targets"]) == 3
    assert positive(output["second_run"])
    assert not cache_dir.exists()


@pytest.mark.long
def test_drop_in_reports_both_contenders_of_a_kind(cache_dir: Path) -> None:
    arguments = ("--device", "cpu", "--kinds", "stable", "--rounds", "1", "--json")
    output = printed(cache_dir, "benches.drop_in", *arguments)
    assert set(output["cold"]) == set(output["warm"]) == {"torch.stable", "jitkern.stable"}
    assert set(output["ratio"]) == {"cold.stable", "warm.stable"}
    assert positive(output["cold"]) and positive(output["warm"]) and positive(output["ratio"])
    assert not cache_dir.exists()


@pytest.mark.long
@needs_triton
def test_triton_compile_reports_both_contenders(cache_dir: Path) -> None:
    arguments = ("--device", "cpu", "--rounds", "1", "--json")
    output = printed(cache_dir, "benches.triton_compile", *arguments)
    assert set(output["seconds"]) == {"triton", "import", "jitkern"}
    assert set(output["ratio"]) == set(output["without"]) == {"one", "forty", "package"}
    assert positive(output["ratio"])
    assert not cache_dir.exists()


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
def test_the_simulation_of_a_fleet_compares_ways_to_fetch(cache_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra `docs` is not installed")
    plot = tmp_path / "plot.svg"
    options = ("--hosts", "200", "--entries", "20", "--plot", str(plot), "--json")
    done = run(cache_dir, "benches.fleet_simulation", *options)
    outcomes = json.loads(done.stdout.splitlines()[-1])["outcomes"]
    assert {"each entry", "index and 5 bundles", "index and 1 bundle"} < set(outcomes)
    for name, outcome in outcomes.items():
        assert outcome["median_s"] <= outcome["p99_s"] < float("inf")
        assert bool(outcome["compiles"]) <= ("failure" in name)
        assert outcome["requests"] * outcome["served"] <= 200 * 48 + 1
    assert plot.read_text().count("hosts ready") == 1


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


@pytest.mark.long
def test_serve_reports_builds_and_requests(cache_dir: Path) -> None:
    output = printed(
        cache_dir, "benches.serve", "--json", "--rounds", "1", "--requests", "20",
        "--connections", "1", "2",
    )  # fmt: skip
    assert set(output["seconds"]) == {"build", "again", "alike", "60 at once"}
    assert positive(output["seconds"])
    kinds = {f"{what}, {count} connections" for what in ("bundle", "index") for count in (1, 2)}
    assert set(output["per_second"]) == kinds
    assert positive(output["per_second"])


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
