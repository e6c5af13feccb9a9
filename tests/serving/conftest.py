"""A small model that babbles, and a server of it."""

from __future__ import annotations

import pytest
from running_server import Running, scripted

from nanorchestra.engine.engine import Engine


@pytest.fixture(scope="session")
def make_engine(make_nano, nano_tokenizer):
    def make():
        return scripted(Engine(make_nano(), nano_tokenizer, num_pages=2000, page_size=4))

    return make


@pytest.fixture(scope="module")
def running(make_engine):
    running = Running(make_engine())
    yield running
    running.assert_idle()
    running.stop()
