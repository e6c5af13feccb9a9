"""Plants bugs in kernels, one at a time, and runs the tests that should notice: `python tests/planted_bugs.py [all | WORD]`.

Each bug is one replacement in a copy of the tree; there are as many trees at a time as cores. A bug that no test catches is printed as MISSED, and
the exit status is 1. Without a word, the nine classical ones of the kernels (CLASSICAL); with one, those whose names or files contain it.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

ROOT = Path(__file__).parent.parent
KERNELS = [  # (name, file in kernels/, test_kernel_*.py, right, wrong)
    (
        "dropped mask",
        "decode_shared",
        "decode",
        'tl.where(seen[None, :], tl.dot(q, tl.trans(k), input_precision="ieee"), -1e30)',
        'tl.dot(q, tl.trans(k), input_precision="ieee")',
    ),
    (
        "wrong page stride",
        "decode_shared",
        "decode",
        "((page * HKV + head) * PAGE + start % PAGE)",
        "((page * HKV + head) * BLOCK_N + start % PAGE)",
    ),
    (
        "missing merge weight",
        "decode",
        "decode",
        "tl.sum(weights[:, None] * values, 0)",
        "tl.sum(values, 0)",
    ),
    (
        "swapped nibbles",
        "quantised",
        "quantised",
        "tl.dot(high, high_run, 16 * tl.dot(low, low_run,",
        "tl.dot(high, low_run, 16 * tl.dot(low, high_run,",
    ),
    (
        "bf16 accumulation of logits",
        "logprob",
        "logprob",
        '.T, logits, input_precision="ieee")',
        '.T, logits, input_precision="ieee").to(tl.bfloat16).to(tl.float32)',
    ),
    (
        "off-by-one causal",
        "flash",
        "flash",
        "tl.where(causal, rows + 1, key_end), 0)",
        "tl.where(causal, rows + 2, key_end), 0)",
    ),
    (
        "off-by-one causal in the prefill",
        "prefill",
        "prefill",
        "<= position + tl.arange(0, M)[:, None]",
        "< position + tl.arange(0, M)[:, None]",
    ),
    (
        "off-by-one causal for keys",
        "flash_backward",
        "flash",
        "tl.where(causal, keys, start), end)",
        "tl.where(causal, keys + 1, start), end)",
    ),
    ("forgotten eps", "norm", "norm", "/ N + eps) * weight", "/ N) * weight"),
    ("forgotten eps of q and k", "rope", "rope", "/ D + eps)", "/ D)"),
    (
        "int32 row offset",
        "norm",
        "norm",
        "(tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]",
        "(tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]",
    ),
    (
        "int32 row offset of the cache",
        "decode_shared",
        "decode",
        "page = next_page.to(tl.int64)",
        "page = next_page",
    ),
    (
        "unscaled temperature",
        "sample",
        "sample",
        "logits * (1.0 / tl.where(greedy, 1.0, degrees))[:, None]",
        "logits",
    ),
    (
        "unscaled temperature of log-probabilities",
        "logprob",
        "logprob",
        "logits * scale, -1e30)",
        "logits, -1e30)",
    ),
    (
        "gate and up swapped",
        "swiglu",
        "swiglu",
        "gate * tl.sigmoid(gate) * up",
        "up * tl.sigmoid(up) * gate",
    ),
    ("wrong kv head", "flash", "flash", "+ head // G * D", "+ head % (H // G) * D"),
    (
        "log-sum-exp in base 2",
        "flash",
        "flash",
        "(top + tl.log2(mass)) * 0.6931471805599453",
        "top + tl.log2(mass)",
    ),
    (
        "running sum not shrunk",
        "prefill",
        "prefill",
        "total * shrink + tl.sum(p, 1)",
        "total + tl.sum(p, 1)",
    ),
    (
        "delta missing",
        "flash_backward",
        "flash",
        'input_precision="ieee") - deltas[:, None])',
        'input_precision="ieee"))',
    ),
    ("dk not scaled", "flash_backward", "flash", "(total_k * SCALE)", "total_k"),
    (
        "one head too few in dk and dv",
        "flash_backward",
        "flash",
        "range(0, G * tiles)",
        "range(0, tl.maximum(G - 1, 1) * tiles)",
    ),
    (
        "logits beyond the vocabulary",
        "logprob",
        "logprob",
        "tl.where(ids[None, :] < vocab, logits * scale, -1e30)",
        "logits * scale",
    ),
    (
        "target of another chunk",
        "logprob",
        "logprob",
        "mask=inside & (targets >= chunk * BLOCK_V) & (targets < (chunk + 1) * BLOCK_V)",
        "mask=inside",
    ),
    (
        "entropy's sign in the gradient",
        "logprob_backward",
        "logprob",
        "p * (logp + tl.load(entropy_ptr + row))",
        "p * (logp - tl.load(entropy_ptr + row))",
    ),
    (
        "noise without position",
        "sample",
        "sample",
        "exponential(seed[:, None], position[:, None],",
        "exponential(seed[:, None], position[:, None] * 0,",
    ),
    (
        "noise by row",
        "sample",
        "sample",
        "exponential(seed[:, None],",
        "exponential(seed[:, None] + rows[:, None],",
    ),
    ("sums of chunks not rescaled", "sample", "sample", "* tl.exp(tops - top), 0)", ", 0)"),
    ("dweight not accumulated", "norm", "norm", "dweight += grad", "dweight = grad"),
    (
        "rotation the other way",
        "rope",
        "rope",
        "n1 * cos - n2 * sin, n2 * cos + n1 * sin",
        "n1 * cos + n2 * sin, n2 * cos - n1 * sin",
    ),
    ("zero point forgotten", "quantised", "quantised", "- zero.to(low_run.dtype)", ""),
]

BUGS = [
    (name, f"kernels/{file}.py", f"test_kernel_{test}.py", right, wrong)
    for name, file, test, right, wrong in KERNELS
]
CLASSICAL = {
    "dropped mask",
    "wrong page stride",
    "missing merge weight",
    "swapped nibbles",
    "off-by-one causal",
    "forgotten eps",
    "int32 row offset",
    "unscaled temperature",
    "gate and up swapped",
}


def caught(file: str, tests: str, right: str, wrong: str) -> bool:
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        for name in ("kernels", "nanorchestra", "tests", "pytest.ini"):
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy(source, tree / name)
        path = tree / file
        text = path.read_text()
        if right not in text:
            raise SystemExit(f"{file}: the text to replace is not there any more: {right}")
        path.write_text(text.replace(right, wrong))
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            *f"tests/{tests}".split(),
        ]
        code = subprocess.run(
            command, cwd=tree, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
        ).returncode
        return code == 1 or code < 0  # a test failed, or the process died of what it did


def main(words: list[str]) -> int:
    chosen = [
        bug
        for bug in BUGS
        if words in ([], ["all"])
        and (words or bug[0] in CLASSICAL)
        or words
        and (words[0] in bug[0] or words[0] in bug[1])
    ]
    missed = 0
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        found = pool.map(lambda bug: caught(*bug[1:]), chosen)
        for (name, file, *_), seen in zip(
            tqdm(chosen, desc="planted bugs", unit="bug", disable=None), found
        ):
            missed += not seen
            tqdm.write(f"{'caught' if seen else 'MISSED'}  {file}: {name}")
    print(f"{len(chosen) - missed} of {len(chosen)} planted bugs caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
