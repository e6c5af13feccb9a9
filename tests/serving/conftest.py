"""A small model that babbles, and a server of it."""

from __future__ import annotations

import pytest
from running_server import Running, scripted

from nanorchestra.engine.engine import Engine
from nanorchestra.serving.service import Limits


@pytest.fixture(scope="session")
def make_engine(make_nano, nano_tokenizer):
    def make(**settings):
        pages = {"num_pages": 2000, "page_size": 4}
        return scripted(Engine(make_nano(), nano_tokenizer, **pages, **settings))

    return make


@pytest.fixture(scope="module")
def running(make_engine):
    running = Running(make_engine(), limits=Limits(request_s=60, body_s=2))
    yield running
    running.assert_idle()
    running.stop()
