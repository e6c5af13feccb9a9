"""A small tool orchestrator: the language model, its inference engine, the tool loop, the trainer.

The public names are imported on first use, so that parts without torch load in milliseconds.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Engine": "engine.engine",
    "Completion": "engine.sequence",
    "SamplingParams": "engine.sequence",
    "load_model": "formats.load",
    "pack": "model.native",
    "chat": "model.chat",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(f"{__name__}.{_HOMES[name]}")
    return module if name == "chat" else getattr(module, name)
