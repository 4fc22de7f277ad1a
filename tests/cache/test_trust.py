import os

import pytest

from jitkern.files import trust


def test_own_private_root_is_trusted(tmp_path):
    assert trust.why_untrusted_root(tmp_path / "new" / "cache") == ""


@pytest.mark.parametrize("mode", [0o722, 0o702, 0o777])
def test_a_root_that_others_can_write_is_not(tmp_path, mode):
    root = tmp_path / "cache"
    root.mkdir()
    root.chmod(mode)
    assert "writable by others" in trust.why_untrusted_root(root)


def test_a_world_writable_parent_is_not_unless_sticky(tmp_path):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert "writable by every user" in trust.why_untrusted_root(shared / "cache")
    shared.chmod(0o1777)
    assert trust.why_untrusted_root(shared / "cache") == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a directory away")
def test_somebody_elses_root_is_not(tmp_path):
    root = tmp_path / "cache"
    root.mkdir()
    os.chown(root, 12345, 12345)
    assert "belongs to user 12345" in trust.why_untrusted_root(root)
    assert "belongs to user 12345" in trust.layer_of(root, trust.Trust())
