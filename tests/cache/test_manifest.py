import hashlib
import json

import pytest

from jitkern.cache.manifest import Artifact, Manifest

MANIFEST = Manifest(
    {"op": "a::b", "target": "t", "n": [1, None]},
    {"k.cubin": Artifact.of(b"code")},
    {"symbol": "k"},
    {"name": "nvrtc"},
    0.5,
)


def test_round_trip():
    assert Manifest.decode(MANIFEST.encode()) == MANIFEST


def test_it_is_json_whose_last_field_is_the_checksum():
    fields = json.loads(MANIFEST.encode())
    assert list(fields)[-1] == "sha256"
    assert fields["inputs"] == MANIFEST.inputs


def test_every_flipped_byte_is_noticed():
    data = MANIFEST.encode()
    for i in range(len(data)):
        for flip in (1, 0x20, 0x80):
            with pytest.raises(ValueError, match=r"."):
                Manifest.decode(data[:i] + bytes([data[i] ^ flip]) + data[i + 1 :])


def test_every_truncation_is_noticed():
    data = MANIFEST.encode()
    for end in range(len(data)):
        with pytest.raises(ValueError, match=r"."):
            Manifest.decode(data[:end])


def seal(body):
    return body + b',"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()


def sealed(fields):
    return seal(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()[:-1])


GOOD = {
    "inputs": {"op": "a::b", "target": "t"}, "artifacts": {"a": {"size": 1, "sha256": "0" * 64}},
    "meta": {}, "compiler": {}, "seconds": 0,
}  # fmt: skip


def test_a_manifest_of_nothing_but_brackets_is_refused():
    for body in (b"[" * 100000, b'{"a":' * 100000, b'{"inputs":1e999', b'{"a":\xff'):
        with pytest.raises(ValueError, match=r"."):
            Manifest.decode(seal(body))


@pytest.mark.parametrize(
    "fields",
    [
        {**GOOD, "artifacts": {}},
        {**GOOD, "artifacts": {"../a": {"size": 1, "sha256": "0"}}},
        {**GOOD, "artifacts": {"a": {"size": 1}}},
        {**GOOD, "artifacts": []},
        {**GOOD, "surprise": 1},
        {**GOOD, "artifacts": {"a": {"size": "1", "sha256": "0" * 64}}},
        {**GOOD, "artifacts": {"a": {"size": -1, "sha256": "0" * 64}}},
        {**GOOD, "artifacts": {"a": {"size": True, "sha256": "0" * 64}}},
        {**GOOD, "artifacts": {"a": {"size": 1, "sha256": 5}}},
        {**GOOD, "inputs": []},
        {**GOOD, "inputs": {"op": 1, "target": "t"}},
        {**GOOD, "meta": [1]},
        {**GOOD, "compiler": {"name": 1}},
        {**GOOD, "seconds": "long"},
        {**GOOD, "package": None},
        {k: v for k, v in GOOD.items() if k != "inputs"},
        {k: v for k, v in GOOD.items() if k != "artifacts"},
    ],
)
def test_sealed_but_wrong_fields_are_refused(fields):
    Manifest.decode(sealed(GOOD))
    with pytest.raises(ValueError, match=r"."):
        Manifest.decode(sealed(fields))
