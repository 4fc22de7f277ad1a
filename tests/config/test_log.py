"""What a user reads of the log, who configured logging or did not."""

import pytest

LOCKS = """
import logging, sys
{first}
import jitkern
from jitkern import config
{settings}
logging.getLogger("jitkern.cache.lock").warning("waiting for %s", "pid 12")
logging.getLogger("jitkern.jit").info("%s", "some information")
{last}
"""


@pytest.mark.parametrize("settings", ["", "config.current()"])
@pytest.mark.parametrize(
    ("first", "variables", "shown"),
    [
        ("", {}, ["jitkern: waiting for pid 12"]),
        ("", {"JITKERN_LOG": "info"}, ["jitkern: waiting for pid 12", "jitkern: some information"]),
        ("logging.basicConfig()", {}, ["WARNING:jitkern.cache.lock:waiting for pid 12"]),
        ("logging.basicConfig()", {"JITKERN_LOG": "info"},
         ["WARNING:jitkern.cache.lock:waiting for pid 12", "INFO:jitkern.jit:some information"]),
        ("logging.getLogger('jitkern').addHandler(logging.NullHandler())", {}, []),
        ("logging.getLogger('jitkern.cache').addHandler(logging.StreamHandler())", {}, ["waiting for pid 12"]),
    ],
)  # fmt: skip
def test_a_warning_is_shown_once_and_says_whose_it_is(
    run_python, first, variables, shown, settings
):
    done = run_python(LOCKS.format(first=first, settings=settings, last=""), **variables)
    if not settings:  # nobody asked for the settings yet
        shown = [line for line in shown if "information" not in line]
    assert done.stderr.splitlines() == shown


def test_who_configures_logging_later_gets_each_record_once(run_python):
    last = "logging.basicConfig(); logging.getLogger('jitkern.jit').warning('again')"
    done = run_python(LOCKS.format(first="", settings="config.current()", last=last))
    assert done.stderr.splitlines() == ["jitkern: waiting for pid 12", "WARNING:jitkern.jit:again"]


@pytest.mark.long
def test_stderr_is_looked_up_when_a_record_comes(run_python):
    last = (
        "import io; sys.stderr = io.StringIO(); logging.getLogger('jitkern').warning('again')\n"
        "print(sys.stderr.getvalue()); sys.stderr = None; logging.getLogger('jitkern').warning('no')"
    )
    done = run_python(LOCKS.format(first="", settings="", last=last))
    assert (done.stdout, done.stderr) == ("jitkern: again\n\n", "jitkern: waiting for pid 12\n")


def test_a_misspelt_variable_is_told_of_once(run_python):
    code = "from jitkern import config\nconfig.current(), config.current()\n"
    done = run_python(code, JITKERN_COMPLE="never", JITKERN_OF_SOMEBODY_ELSE="1")
    says = "jitkern: JITKERN_COMPLE is not a setting and has no effect: did you mean "
    assert done.stderr == f"{says}JITKERN_COMPILE?\n"
