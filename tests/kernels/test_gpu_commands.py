"""The first day on a GPU, in small: `python benchmarks/gpu.py --first`."""

import subprocess
import sys

import pytest

from benchmarks import gpu
from benchmarks.gpu_parts import Part, first


@pytest.mark.slow
def test_the_first_parts_pass_in_small_and_find_a_product_that_is_rounded(monkeypatch):
    """Beside them --first runs an engine and a GRPO step, which other tests run in small."""
    for name, work in gpu.FIRST.items():
        module, function = work.split(".")
        if module == "first":
            part = Part(rehearse=True)
            getattr(first, function)(part)
            assert part.figures, name
    product = first.wide_product

    def rounded(a, b, out):
        out.copy_(product(a, b).bfloat16())

    monkeypatch.setattr(first, "wide_product", rounded)
    with pytest.raises(AssertionError, match="a product is off by"):
        first.wide_products(Part(rehearse=True))


@pytest.mark.slow
def test_the_parts_import_no_world_server_or_index():
    modules = {work.split(".")[0] for work in (gpu.FIRST | gpu.PARTS).values()}
    code = f"import sys, {', '.join(f'benchmarks.gpu_parts.{name}' for name in modules)}\n"
    code += "print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=gpu.ROOT, capture_output=True, text=True, check=True
    )
    imported = done.stdout.split()
    around = ("worlds", "train", "tools", "reward", "faiss", "nanorchestra.serving")
    around += ("nanorchestra.tools", "nanorchestra.formats")
    assert not [name for name in imported if name.startswith(around)]
