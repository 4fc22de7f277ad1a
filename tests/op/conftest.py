"""What the tests of ops share."""

import itertools

import pytest
from helpers import declared

_number = itertools.count()


@pytest.fixture
def declare(request, tmp_path):
    """An op with this schema, launch function and reference, on the `KERNELS` of the test's module."""

    def make(signature, launch, reference=None, **options):
        schema = f"jitkern_test::op{next(_number)}{signature}"
        text = request.module.KERNELS
        path = tmp_path / "kernels.cpp"
        return declared(schema, path, text, launch, reference, **options)

    return make
