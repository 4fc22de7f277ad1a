"""What an error that a call raises has behind it."""

import pytest

import jitkern


def test_what_an_error_followed_is_its_context():
    before = OSError("before")
    try:
        raise before  # noqa: TRY301
    except OSError:
        with pytest.raises(Exception, match="vec_add") as caught:
            jitkern.ops.vec_add(1, 2)
    assert caught.value.__context__ is before and caught.value.__cause__ is None
