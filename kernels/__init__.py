"""Triton kernels of Qwen3: one family a file, with its launcher and a reference in plain PyTorch.

`python -m kernels.compile` compiles them for sm_80, sm_89 and sm_90 without a GPU.
`python -m kernels.bench` measures them on one.
"""
