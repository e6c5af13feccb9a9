"""Triton kernels of Qwen3: one family a file, with its launcher and a reference in plain PyTorch.

benchmarks/gpu_parts/compile.py compiles them for three kinds of GPU without one; benchmarks/gpu.py
checks and times them on one.
"""
