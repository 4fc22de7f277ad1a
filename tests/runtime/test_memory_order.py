"""What one thread tells the launch runtime, and others read without a lock, is published in order."""

import shutil
import subprocess
from pathlib import Path

import pytest

from jitkern.runtime import binding, code_page

HARNESS = Path(__file__).with_name("threads.c").read_text()


def races(folder: Path, text: str) -> str:
    """The report of ThreadSanitizer on the runtime with this text; "" for none."""
    source, program = folder / "threads.c", folder / "threads"
    source.write_text(text + HARNESS)
    flags = ["-O1", "-g", "-w", "-fno-math-errno", "-fsanitize=thread", "-pthread"]
    command = ["cc", *flags, "-o", program]
    empty = {"input": "int main(void) { return 0; }", "text": True, "capture_output": True}
    if (
        not shutil.which("cc")
        or subprocess.run([*command, "-x", "c", "-"], **empty, check=False).returncode
    ):
        pytest.skip("needs a C compiler with ThreadSanitizer")
    subprocess.run([*command, source], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer does not run on this kernel")
    assert done.returncode == (66 if done.stderr else 0), done.stderr
    return done.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("order", "weaker", "found"),
    [("", "", ""), ("RELEASE", "RELAXED", "data race"), ("ACQUIRE", "RELAXED", "data race")],
)
def test_no_call_reads_what_another_thread_is_writing(order, weaker, found, tmp_path):
    text = binding.variant().source.text
    said = races(
        tmp_path, text.replace(f"__ATOMIC_{order}", f"__ATOMIC_{weaker}") if order else text
    )
    assert found in said and bool(said) == bool(found), said


def test_trampolines_of_aarch64_acquire_what_a_store_releases():
    head, begin, trampolines = code_page.MACHINES["aarch64"](0x1111, 0x2222, 0x3333)
    words = [int.from_bytes(head[i : i + 4], "little") for i in range(0, 16, 4)]
    assert words == [0x58000090, 0xC8DFFE10, 0xD61F0200, 0xD503201F]  # ldr, ldar, br x16; nop
    assert head[16:24] == (0x1111).to_bytes(8, "little") and begin % 4 == 0
    place = code_page.HEAD + 5 * code_page.SIZE
    (code,) = trampolines(5, range(place, place + 1))
    move, jump = (int.from_bytes(code[i : i + 4], "little") for i in (0, 4))
    assert move == 0x52800003 | 5 << 5  # mov w3, #5
    offset = (jump & 0x3FFFFFF) - (1 << 26)  # b, in words
    assert jump >> 26 == 0b000101 and place + 4 + 4 * offset == 0
