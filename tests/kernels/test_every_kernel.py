"""What every kernel promises, at the small shapes of benchmarks/gpu_parts/cases.py."""

from dataclasses import replace

import pytest
import torch
from kernel_check import DEVICE, ORDERS, GuardPages, exit_code, program_order
from torch.utils._pytree import tree_leaves

from benchmarks.gpu_parts.cases import SMALL, all_cases

# A tree contains a sequence, a case with gradients the one without, and several rows the one.
CONTAINED = "flash_attention", "flash_attention backward", "qk_norm_rope"


def contained(name):
    return name in CONTAINED or name.endswith((" M=1", " M=16", " M=64")) or " B=1 " in name


CASES = [case for case in all_cases(SMALL) if not contained(case.name)]
ROWS = {  # arguments that have a row for each token
    "rms_norm": (0,),
    "add_rms_norm": (0, 1),
    "qk_norm_rope": (0, 3, 4),
    "qk_norm_rope_store": (0, 3, 4, 7),
    "swiglu": (0,),
    "quantised_linear": (0,),
}
PAGES = {  # keys, values, and what says where their pages are
    "qk_norm_rope_store": (5, 6, 7),
    "decode_attention": (1, 2, 3),
    "prefill_attention": (1, 2, 3),
}
STRIDED = {*ROWS, *PAGES} - {"quantised_linear"}  # rows of the first argument may lie apart


def of(cases, kernels):
    chosen = [case for case in cases if case.name.split()[0] in kernels]
    return pytest.mark.parametrize("case", chosen, ids=[case.name for case in chosen])


in_the_interpreter = pytest.mark.skipif(DEVICE == "cuda", reason="a property of the interpreter")
every_kernel = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])


def made(case):
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return case.make()


def results(case):
    """What a case returns and the tensors that it was given, which it may have written."""
    arguments = made(case)
    return tensors((case.call(*arguments), arguments))


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


@in_the_interpreter
@every_kernel
def test_the_order_of_programs_changes_no_bit(case):
    results_of_orders = []
    for order in ORDERS:
        with program_order(order):
            results_of_orders.append(results(case))
    for one, two in zip(*results_of_orders, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0, equal_nan=True)


@in_the_interpreter
def test_no_access_lies_outside_of_a_tensor():
    """The output ends with the kernel that accesses what it should not."""

    def guarded():
        with GuardPages():
            for case in CASES:
                print(case.name, flush=True)
                results(case)

    assert exit_code(guarded) == 0


@of(CASES, ROWS)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(case):
    arguments = made(case)
    having_rows = ROWS[case.name.split()[0]]
    count = len(arguments[0])
    whole = tensors(case.call(*arguments))
    for rows in (slice(1), slice(count // 3, count - 1)):
        part = [x[rows] if i in having_rows else x for i, x in enumerate(arguments)]
        for one, two in zip(tensors(case.call(*part)), whole, strict=True):
            assert len(two) != count or torch.equal(one, two[rows])


def far_rows(x):
    """Returns x with rows so far apart that the last begins 2^31 elements behind the first.

    A wrapped offset reads other memory, before the first. Only the rows take memory.
    """
    stride = 2**31 // (len(x) - 1) + 16
    storage = x.new_empty(2**31 + (len(x) - 1) * stride + x[0].numel())
    return storage.as_strided(x.shape, (stride, *x.stride()[1:]), 2**31).copy_(x)


def far_pages(cache):
    """Returns a cache whose last pages are those of `cache`, and the first of them."""
    first = 2**31 // cache[0].numel()
    storage = cache.new_empty(2**32 + cache.numel())
    far = storage[2**31 :].view(first + len(cache), *cache.shape[1:])
    far[first:] = cache
    return far, first


FAR = [case for case in all_cases(replace(SMALL, rows=3, samples=3)) if not contained(case.name)]


@of(FAR, STRIDED)
def test_offsets_beyond_32_bits_change_no_bit(case):
    kernel = case.name.split()[0]
    near = made(case)
    far = [far_rows(near[0]), *near[1:]]
    caches = PAGES.get(kernel, ())[:2]
    for cache in caches:
        far[cache], first = far_pages(near[cache])
    if caches:
        where = PAGES[kernel][2]
        tokens = SMALL.page if kernel == "qk_norm_rope_store" else 1  # a slot is a token's
        far[where] = near[where] + first * tokens
    results_of_far = [x.clone() for x in tensors(case.call(*far))]
    for one, two in zip(results_of_far, tensors(case.call(*near)), strict=True):
        assert torch.equal(one, two)
    for cache in caches:
        assert torch.equal(far[cache][first:], near[cache])
