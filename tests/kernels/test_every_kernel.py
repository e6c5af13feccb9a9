"""Properties that every kernel has, at the small shapes of benchmarks/gpu_parts/cases.py."""

import signal

import pytest
import torch
import triton
import triton.language as tl
from kernel_check import DEVICE, ORDERS, GuardPages, exit_code, program_order
from torch.utils._pytree import tree_leaves

from benchmarks.gpu_parts.cases import SMALL, all_cases

NAMES = [case.name for case in all_cases(SMALL)]
# A case with gradients contains the one without.
CASES = [case for case in all_cases(SMALL) if f"{case.name} backward" not in NAMES]
in_the_interpreter = pytest.mark.skipif(DEVICE == "cuda", reason="a property of the interpreter")
every_kernel = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


@pytest.fixture(scope="module")
def guard_pages():
    """The first use of a mode imports half of torch: here once, not in every forked process."""
    with GuardPages(at_end=True):
        torch.ones(1)


def results(case):
    """What a case returns and the tensors that it was given, which it may have written."""
    torch.manual_seed(0)
    arguments = case.make()
    outputs = case.call(*arguments)
    return [x for x in tree_leaves((outputs, arguments)) if isinstance(x, torch.Tensor)]


@in_the_interpreter
@every_kernel
def test_the_order_of_programs_changes_no_bit(case):
    results_of_runs = []
    for order in ORDERS:
        with program_order(order):
            results_of_runs.append(results(case))
    for other in results_of_runs[1:]:
        for one, two in zip(results_of_runs[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


@in_the_interpreter
@every_kernel
def test_no_access_lies_outside_of_a_tensor(guard_pages, case):
    for at_end in (True, False):

        def guarded(at_end=at_end):
            with GuardPages(at_end):
                results(case)

        assert exit_code(guarded) == 0


@in_the_interpreter
@pytest.mark.parametrize("at_end, first", [(True, 1), (False, -1)])
def test_guard_pages_end_a_process_that_reads_outside_of_a_tensor(guard_pages, at_end, first):
    @triton.jit
    def copy_kernel(x_ptr, out_ptr, first):
        rows = tl.arange(0, 64)
        tl.store(out_ptr + rows, tl.load(x_ptr + first + rows))

    def copy(x, first):
        copy_kernel[(1,)](x, torch.empty(64), first)

    def guarded(first):
        with GuardPages(at_end):
            copy(torch.ones(64), first)

    assert exit_code(lambda: guarded(0)) == 0
    assert exit_code(lambda: guarded(first)) == -signal.SIGSEGV


@in_the_interpreter
def test_a_program_that_needs_an_earlier_one_is_noticed_in_another_order():
    @triton.jit
    def count_kernel(x_ptr):
        program = tl.program_id(0)
        tl.store(x_ptr + program + 1, tl.load(x_ptr + program) + 1)

    def count(x):
        count_kernel[(8,)](x)
        return x.tolist()

    counts = {}
    for order in ORDERS:
        with program_order(order):
            counts[order] = count(torch.zeros(9))
    assert counts["ascending"] == [0, 1, 2, 3, 4, 5, 6, 7, 8]
    assert counts["descending"] == [0, 1, 1, 1, 1, 1, 1, 1, 1] != counts["shuffled"]
