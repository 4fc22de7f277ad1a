"""Fixtures of caches that are killed or meet errors."""

import os

import pytest
from publishing import SCENARIOS, in_memory

from jitkern import config, jit
from jitkern.jit import active_cache


@pytest.fixture
def folder():
    with in_memory() as path:
        yield path


@pytest.fixture(params=SCENARIOS, ids=lambda name: name.replace(" ", "_"))
def scenario(request):
    return SCENARIOS[request.param]


@pytest.fixture
def ensure(folder, monkeypatch, compiler, variant, target):
    """Compile into the cache at a path."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)

    def ensure(root):
        active_cache.spilled.clear()
        with config.using(cache_dir=root):
            return jit.ensure(variant, target)

    return ensure
