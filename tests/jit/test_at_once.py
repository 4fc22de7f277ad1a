"""Kernels that one call asks for are compiled at once, where that is quicker."""

import threading

import pytest

from jitkern import config
from jitkern.errors import CompileError
from jitkern.jit import at_once

LONGEST = 60.0  # seconds


@pytest.mark.parametrize(
    ("jobs", "count", "expected"), [(4, 1, 1), (4, 7, 1), (4, 9, 2), (2, 40, 2)]
)
def test_threads_are_worth_their_processes(jobs, count, expected):
    with config.using(jobs=jobs):
        assert at_once.threads_for(count) == expected


def test_results_come_in_order_and_errors_where_they_belong():
    together = threading.Barrier(2)

    def ensure(number):
        if number < 2:
            together.wait(LONGEST)  # each waits for the other
        if number == 3:
            raise CompileError("refused")
        return number, config.current().verbose

    with config.using(jobs=2, verbose=True), at_once.each(ensure, [*range(8)]) as results:
        assert [result() for result in results[:3]] == [(n, True) for n in range(3)]
        with pytest.raises(CompileError, match="refused"):
            results[3]()
        assert [result()[0] for result in results[4:]] == [4, 5, 6, 7]


def test_after_an_error_no_more_is_begun():
    begun, goes_on = [], threading.Event()

    def ensure(number):
        begun.append(number)
        if number:
            goes_on.wait(LONGEST)
        raise CompileError("refused")

    each = at_once.each(ensure, [*range(8)])
    with config.using(jobs=2), pytest.raises(CompileError), each as results:
        results[0]()
    assert len(begun) < 8
    goes_on.set()
