"""`.tune` in another process: what it takes over, and what prewarm and recordings make ready."""

import pytest
from helpers import needs_runtime
from tuning import MODULE, RUN, SOURCE


@pytest.fixture
def process(tmp_path, run_python):
    """Run RUN in a process, over MODULE with these configurations; returns what it prints."""
    (tmp_path / "k.cpp").write_text(SOURCE)

    def run(ways="(5, 3)", key="x.shape[0]", *, warm=False, **environment):
        (tmp_path / "tuned.py").write_text(MODULE.format(ways=ways, key=key))
        done = run_python(RUN.format(warm=warm), PYTHONPATH=str(tmp_path), **environment)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    run_python("from jitkern import jit; from jitkern.runtime import binding\n"
               "from jitkern.target import Target\n"
               "jit.ensure(binding.variant(), Target.current('cpu'))")  # fmt: skip
    return run


@pytest.mark.long
@needs_runtime
def test_a_second_process_measures_and_compiles_nothing(process):
    assert process() == "[6.0, 6.0, 6.0] [5, 3]"
    assert process(warm=True, JITKERN_COMPILE="never", PATH="/nonexistent") == "[6.0, 6.0, 6.0] 0"


@pytest.mark.long
@needs_runtime
@pytest.mark.parametrize(
    ("edit", "gives"),
    [
        ({"ways": "(5, 2)"}, "[4.0, 4.0, 4.0] [5, 2]"),
        ({"key": "x.dim()"}, "[6.0, 6.0, 6.0] [5, 3]"),
    ],
    ids=["configurations", "key"],
)
def test_an_edit_is_tuned_anew(process, edit, gives):
    before = process()
    assert process(**edit) == gives
    assert process() == before.replace("[5, 3]", "[]")


@pytest.mark.long
def test_prewarm_builds_every_configuration_and_chooses_none(process, run_python, tmp_path):
    process(ways="(1,)")
    code = "import tuned\nfrom jitkern.cli import main; main(['prewarm', '-v', 'jitkern_tuned::scaled'])"
    (tmp_path / "tuned.py").write_text(MODULE.format(ways="(5, 3, 4)", key="None"))
    done = run_python(code, JITKERN_CACHE_DIR=str(tmp_path / "other"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    names = {line.split()[2] for line in done.stdout.splitlines() if "jitkern_tuned" in line}
    assert {"scale.f32.WAY3", "scale.f32.WAY4", "scale.f32.WAY5"} == names
    assert "stays on the Python launcher" in done.stderr
    assert "the device chooses among its 3 configurations" in done.stderr


@pytest.mark.long
@needs_runtime
@pytest.mark.parametrize("ways", ["(5, 3)", "(3,)"], ids=["chosen", "only one"])
def test_prewarm_with_a_choice_leaves_nothing_to_do(process, run_python, tmp_path, ways):
    process(ways)
    for record in (tmp_path / "cache").rglob("*.call.*"):
        record.rename(tmp_path / record.name)
    code = "import tuned\nfrom jitkern.cli import main; main(['prewarm', '-v', 'jitkern_tuned::scaled'])"
    done = run_python(code, PYTHONPATH=str(tmp_path))
    assert "call" in done.stdout, done.stderr
    assert process(ways, warm=True, JITKERN_COMPILE="never") == "[6.0, 6.0, 6.0] 0"


@pytest.mark.long
def test_a_recorded_call_is_made_ready_in_every_configuration(process, run_python, tmp_path):
    calls = str(tmp_path / "calls")
    process(JITKERN_RECORD=calls)
    code = f"from jitkern.cli import main; main(['prewarm', '-v', '--from', {calls!r}, 'tuned'])"
    done = run_python(code, JITKERN_CACHE_DIR=str(tmp_path / "other"), PYTHONPATH=str(tmp_path))
    assert {"scale.f32.WAY3", "scale.f32.WAY5"} <= set(done.stdout.split()), done.stderr
