"""What `verbose` shows of compilers: commands, and their output as it comes."""

import io
import sys

import pytest
import torch

import jitkern
from jitkern import config
from jitkern.compilers import child_process, result


class Terminal(io.StringIO):
    """A stderr on which the reader answers the first line by making a file."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def write(self, text):
        if text == "first\n":
            self.answer.touch()
        return super().write(text)


def test_output_is_shown_while_the_command_runs(tmp_path, monkeypatch):
    terminal = Terminal(tmp_path / "seen")
    monkeypatch.setattr(sys, "stderr", terminal)
    wait = "echo first; for i in $(seq 30000); do [ -e seen ] && exit 3; sleep 0.01; done"
    command = ["sh", "-c", f"{wait}; echo nobody looked"]
    assert child_process.run(command, shown=True, cwd=tmp_path) == (3, "first\n")
    assert terminal.getvalue() == f"$ sh -c '{command[2]}'\nfirst\n"
    monkeypatch.setattr(sys, "stderr", None)
    assert child_process.run(["echo", "x"], shown=True) == (0, "x\n")


@pytest.mark.long
def test_verbose_shows_the_command_of_a_kernel_and_no_probe(capsys):
    text = "#warning look\nvoid k(float *x) { *x = 1; }"
    x = torch.zeros(1)
    with config.using(verbose=True):
        jitkern.cpp_kernel(text=text, name="k")(x)
    shown = capsys.readouterr().err
    assert "#warning look" in shown
    commands = [line for line in shown.splitlines() if line.startswith("$")]
    assert [line.rpartition(" -o ")[2] for line in commands] == ["out.o", "out.so"]
    jitkern.cpp_kernel(text=f"{text}\n", name="k")(x)
    assert x.item() == 1 and not capsys.readouterr().err


@pytest.mark.parametrize("verbose", [True, False])
def test_what_is_no_process_is_shown_at_its_end(tmp_path, capsys, verbose):
    with config.using(verbose=verbose):
        result.write_log(tmp_path, ["nvrtc", "a b"], "a warning\n", unseen=True)
        result.write_log(tmp_path, ["c++"], "which was seen\n")
    assert capsys.readouterr().err == "$ nvrtc 'a b'\na warning\n" * verbose
