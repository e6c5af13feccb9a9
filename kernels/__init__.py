"""Triton kernels for everything that Qwen3 needs on a GPU, one family a file, each with its launcher and its reference in plain torch.

`python -m kernels.compile` compiles all of them for sm_80, sm_89 and sm_90 without a GPU; `python -m kernels.bench` measures them on one.
"""
