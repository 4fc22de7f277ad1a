import io
import logging
import time

import pytest

from jitkern import jit
from jitkern.jit import announcement


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _terminal(monkeypatch):
    """Make stderr a terminal; in the test, since pytest sets stderr again after its fixtures."""
    stream = _Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    return stream


def _compile_for_longer(compiler, monkeypatch, until):
    """Let the compiler wait until the announcement is there (or 30 s, which then fails)."""
    monkeypatch.setattr(announcement, "PATIENCE", 0.01)
    compile_ = compiler.compile

    def slowly(*args):
        assert until()
        return compile_(*args)

    monkeypatch.setattr(compiler, "compile", slowly)


def _waiting_for(text, stream):
    def wait():
        deadline = time.monotonic() + 20
        while text not in stream() and time.monotonic() < deadline:
            time.sleep(0.01)
        return text in stream()

    return wait


def test_a_long_compile_is_announced_on_a_terminal(compiler, variant, target, monkeypatch):
    terminal = _terminal(monkeypatch)
    _compile_for_longer(compiler, monkeypatch, _waiting_for("compiling", terminal.getvalue))
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
    _compile_for_longer(compiler, monkeypatch, _waiting_for("compiling", lambda: caplog.text))
    jit.ensure(variant, target)
    assert "once; cached afterwards" in caplog.text
    assert capsys.readouterr().err == ""


def test_a_failed_compile_is_not_said_to_be_done(monkeypatch):
    terminal = _terminal(monkeypatch)
    monkeypatch.setattr(announcement, "PATIENCE", 0.01)

    def fail():
        with announcement.announced("x for y"):
            assert _waiting_for("x for y", terminal.getvalue)()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "compiled" not in terminal.getvalue()


def test_commands_with_their_own_progress_silence_it(compiler, variant, target, monkeypatch):
    terminal = _terminal(monkeypatch)
    monkeypatch.setattr(announcement, "PATIENCE", 0.0)
    timers = []
    monkeypatch.setattr(announcement.threading, "Timer", timers.append)
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
            time.sleep(0.05)
