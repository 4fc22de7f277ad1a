"""No text of a client reaches a compiler: mutated lines build declared ops alone, and raise nothing."""

import json
import random
import string

import pytest
from clients import HERE, VEC_ADD, Client, asked, line, tensor

from jitkern import cache_tools, jit

OTHER = line("jitkern::softmax", tensor(4, 8))
SEEDS = (
    VEC_ADD,
    OTHER,
    line("jitkern::vec_add", tensor(2, 3, dtype="float64"), 2.5, None, [1, "a"]),
)
WORDS = (
    "jitkern::softmax", "jitkern::muladd", "jitkern::runtime", "os.system", "nvrtc", "cuda", "triton", "float32",
    "bfloat16", "complex64", "tensor", "dtype", "device", "float", "shape", "-1", "0", "1e999", "null", "[]", "{}",
    "NaN", "\\u0000", "\\ud800", "#include <x>", '"); system(\\"id\\"); ("', "../../etc/passwd", "9" * 19, "9" * 400, "true",
)  # fmt: skip


def mutated(rng):
    text = rng.choice(SEEDS)
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(text))
        end = min(len(text), at + rng.choice((0, 1, 1, 2, 8, 40)))
        new = rng.choice(
            (
                "", rng.choice(string.printable), rng.choice(WORDS), f'"{rng.choice(WORDS)}"', text[end : end + 20],
                str(rng.randrange(2**rng.randrange(1, 70))),
            )
        )  # fmt: skip
        text = text[:at] + new + text[end:]
        text = text or "x"
    return text


def body_of(rng):
    targets = (HERE, HERE, HERE, "cuda-sm_90-cu130-torch2.13.0", "cpu-x-torch1.0")
    body = asked(mutated(rng), [rng.choice(targets)])
    if rng.random() < 0.1:
        at = rng.randrange(len(body))
        body = body[:at] + rng.randbytes(rng.randrange(4)) + body[at + rng.randrange(4) :]
    return body


@pytest.mark.long
@pytest.mark.parametrize(("count", "seed"), [(400, 1), *((2000, seed) for seed in range(2, 7))])
def test_mutated_lines_compile_only_what_is_declared(serve, count, seed):
    server = serve(jobs=2)
    client = Client(server.url)
    rng = random.Random(seed)
    statuses = set()
    for number in range(count):
        body = body_of(rng)
        answer = client.ask("POST", "/v1/build", body)
        assert answer.status in (200, 400, 404, 422), (number, body, answer)
        if answer.status != 200:
            assert json.loads(answer.body)["reason"], (number, body)
        statuses.add(answer.status)
    assert statuses == {200, 400, 404, 422}
    ops = {row.op for row in cache_tools.rows(jit.open_cache())}
    assert ops == {"jitkern::vec_add", "jitkern::runtime"}
    assert client.get("/healthz").status == 200


@pytest.mark.long
def test_a_text_argument_is_never_handed_to_a_compiler(serve):
    client = Client(serve().url)
    for text in WORDS:
        assert client.build(line("jitkern::vec_add", tensor(4), text)).status in (400, 422), text
    assert not cache_tools.rows(jit.open_cache())
