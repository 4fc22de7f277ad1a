"""Names that are long, or no text: of files, folders and ops."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import H100, needs_nvrtc, replaced

from jitkern import cpp_kernel, cuda_kernel, jit, testing
from jitkern.declare import MAX_NAME, kernel
from jitkern.errors import CompileError, DeclarationError


def test_a_long_file_name_is_no_long_entry(tmp_path):
    path = tmp_path / f"{'k' * 235}.cpp"
    path.write_text('extern "C" void one(int* x) { *x = 1; }')
    x = torch.zeros(1, dtype=torch.int32)
    cpp_kernel(path, "one")(x)
    assert x.item() == 1


def odd(folder):
    """A folder in it whose name is Latin-1, as old disks have some."""
    made = Path(os.fsdecode(os.fsencode(folder) + b"/caf\xe9"))
    made.mkdir()
    return made


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "could not compile `one`"),
        ('a"b', "k.cpp:1:"),
        ("a\nb", "k.cpp:1:"),
        ("a\\n", "k.cpp:1:"),
    ],
    ids=["no text", "quote", "line end", "backslash"],
)
def test_a_folder_with_an_odd_name_has_kernels(tmp_path, name, says):
    folder = tmp_path / name if name else odd(tmp_path)
    folder.mkdir(exist_ok=True)
    (folder / "k.cpp").write_text('extern "C" void one(int* x) { *x = 1; }')
    x = torch.zeros(1, dtype=torch.int32)
    cpp_kernel(folder / "k.cpp", "one")(x)
    assert x.item() == 1
    (folder / "k.cpp").write_text('extern "C" void one(int* x) { *x = 1 }')
    with pytest.raises(CompileError) as e:
        cpp_kernel(folder / "k.cpp", "one")(x)
    str(e.value).encode()
    assert says in str(e.value)


@needs_nvrtc
def test_such_a_folder_has_gpu_kernels_without_own_headers(tmp_path):
    path = odd(tmp_path) / "k.cu"
    (path.parent / "more.h").write_text("#define ONE 1")
    for text, says in (
        ("__global__ void one(int* x) { *x = 1; }", ""),
        ("__global__ void one(int* x) { *x = 1 }", "expected a"),
        ('#include "more.h"\n__global__ void one(int* x) { *x = ONE; }', "path is not UTF-8"),
    ):
        path.write_text(text)
        if not says:
            assert cuda_kernel(path, "one", target=H100).compile().path.is_dir()
            continue
        with pytest.raises(CompileError) as e:
            cuda_kernel(path, "one", target=H100).compile()
        assert says in str(e.value)


def test_a_cache_whose_path_is_no_text_works(tmp_path, monkeypatch):
    root = odd(tmp_path)
    testing.set_settings(monkeypatch, replaced(cache_dir=root))
    (tmp_path / "k.cpp").write_text('extern "C" void one(int* x) { *x = 1; }')
    x = torch.zeros(1, dtype=torch.int32)
    cpp_kernel(tmp_path / "k.cpp", "one")(x)
    assert x.item() == 1
    assert any(jit.open_cache().entries())
    assert list(root.iterdir())


def test_an_op_with_a_very_long_name_is_refused_at_once():
    with pytest.raises(DeclarationError, match=f"has 305 characters, more than {MAX_NAME}"):
        kernel(f"odd::{'k' * 300}(Tensor x) -> Tensor")


@pytest.mark.long
def test_the_command_names_a_cache_whose_path_is_no_text(tmp_path):
    root = odd(tmp_path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "jitkern", "cache", "dir"],
        env={**os.environ, "JITKERN_CACHE_DIR": str(root), "LC_ALL": "C.UTF-8"},
        capture_output=True, check=False,
    )  # fmt: skip
    assert (done.returncode, os.fsencode(root) in done.stdout) == (0, True), done.stderr
