"""A small model that babbles, and a server of it."""

from __future__ import annotations

import pytest
from running_server import ABOUT, Running, scripted

from nanorchestra.engine.engine import Engine
from nanorchestra.serving import loop


@pytest.fixture(scope="session")
def make_engine(make_nano, nano_tokenizer):
    def make(**settings):
        pages = {"num_pages": 2000, "page_size": 4}
        return scripted(Engine(make_nano(), nano_tokenizer, **pages, **settings))

    return make


@pytest.fixture(scope="module")
def running(make_engine):
    with pytest.MonkeyPatch.context() as limits:
        limits.setattr(loop, "REQUEST_S", 60)
        running = Running(make_engine(), about=ABOUT)
        yield running
        running.assert_idle()
        running.stop()
