import io
import logging
import threading

import pytest
from helpers import until

from jitkern import jit
from jitkern.config import background
from jitkern.jit import announcement


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _terminal(monkeypatch):
    """Make stderr a terminal; in the test, since pytest sets stderr again after its fixtures."""
    stream = _Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    return stream


def _compile_for_longer(compiler, monkeypatch, announced):
    """Let the compiler wait until the announcement is there."""
    monkeypatch.setattr(announcement, "PATIENCE", 0.01)
    compile_ = compiler.compile

    def slowly(*args):
        until(announced)
        return compile_(*args)

    monkeypatch.setattr(compiler, "compile", slowly)


def test_a_long_compile_is_announced_on_a_terminal(compiler, variant, target, monkeypatch):
    terminal = _terminal(monkeypatch)
    _compile_for_longer(compiler, monkeypatch, lambda: "compiling" in terminal.getvalue())
    entry = jit.ensure(variant, target)
    name = f"{variant.op} for {entry.manifest.inputs['target']}"
    first, last = terminal.getvalue().splitlines()
    assert first == f"jitkern: compiling {name}, once; cached afterwards"
    assert last.startswith(f"jitkern: compiled {name} in ")
    jit.ensure(variant, target)
    assert len(terminal.getvalue().splitlines()) == 2  # a hit says nothing


def test_elsewhere_a_long_compile_is_logged_at_info(
    compiler, variant, target, monkeypatch, caplog, capsys
):
    caplog.set_level(logging.INFO, logger="jitkern")
    _compile_for_longer(compiler, monkeypatch, lambda: "compiling" in caplog.text)
    jit.ensure(variant, target)
    assert "once; cached afterwards" in caplog.text
    assert capsys.readouterr().err == ""


def test_a_failed_compile_is_not_said_to_be_done(monkeypatch):
    terminal = _terminal(monkeypatch)
    monkeypatch.setattr(announcement, "PATIENCE", 0.01)

    def fail():
        with announcement.announced("x for y"):
            until(lambda: "x for y" in terminal.getvalue())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "compiled" not in terminal.getvalue()


def test_commands_with_their_own_progress_silence_it(compiler, variant, target, monkeypatch):
    terminal = _terminal(monkeypatch)
    monkeypatch.setattr(announcement, "PATIENCE", 0.0)
    timers = []
    monkeypatch.setattr(background.threading, "Timer", timers.append)
    with announcement.silence():
        jit.ensure(variant, target)
    assert not timers
    assert terminal.getvalue() == ""


def test_a_terminal_that_is_gone_fails_no_compile(compiler, variant, target, monkeypatch):
    terminal = _terminal(monkeypatch)
    monkeypatch.setattr(announcement, "PATIENCE", 0.0)
    for gone in (OSError("broken pipe"), None):
        monkeypatch.setattr(terminal, "write", lambda _, gone=gone: (_ for _ in ()).throw(gone))
        if gone is None:
            terminal.close()
        with announcement.announced("x for y"):
            until(lambda: not any(isinstance(t, threading.Timer) for t in threading.enumerate()))
