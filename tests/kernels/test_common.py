"""Kernels that are launched early touch no memory before what is in front of them has ended."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.gpu import ROOT

KERNELS = ["_rms_norm", "_qk_norm_rope", "_swiglu", "_attend_splits", "_merge_splits"]
KERNELS += ["_product", "_add_parts"]
COMPILE = """
import json, sys
from dataclasses import replace
import torch, triton
from benchmarks.gpu_parts.cases import SMALL, activation, decode, norms, products, rotations
from benchmarks.gpu_parts.compile import Driver, inspect

arch = int(sys.argv[1])
driver = Driver(arch)
triton.runtime.driver.set_active(driver)
shape = replace(SMALL, hidden=1024)  # products then have several splits
cases = [norms(shape)[1], rotations(shape)[2], replace(activation(shape), gradients=0)]
cases += [decode(shape, 2, 140), products(shape)[0]]
with torch.device("meta"), torch.no_grad():
    for case in cases:
        case.call(*case.make())
reports = [inspect(binary, arch) for binary in driver.compiled]
print(json.dumps([(report.kernel, report.early, report.waits) for report in reports]))
"""


@pytest.mark.slow
def test_from_sm_90_on_the_kernels_of_a_decode_step_are_launched_early_and_wait_first():
    """Their machine code waits, lets the next kernel in, and only then touches memory."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    runs = {}
    for arch in (80, 90):
        runs[arch] = subprocess.Popen(
            [sys.executable, "-c", COMPILE, str(arch)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
        )
    kernels = {arch: json.loads(run.communicate()[0]) for arch, run in runs.items()}
    assert {tuple(report) for report in kernels[90]} == {(name, True, True) for name in KERNELS}
    assert {tuple(report) for report in kernels[80]} == {(name, False, False) for name in KERNELS}
