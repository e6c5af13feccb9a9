"""Triton kernels of decoder models: one file an operation.

A file opens with what it computes and what limits its speed, then the naive version in plain
PyTorch, the launcher, the kernels, and backward if it has one. Read swiglu.py first, then
rms_norm.py and qk_norm_rope.py; softmax.py before the attention kernels. common.py holds what all
launchers share.

benchmarks/gpu_parts/compile.py compiles all of them for five kinds of GPU without one;
benchmarks/gpu.py checks and times them on one.
"""
