"""The process that tries grammars, so that none costs the server more than a limit.

`grammars.py` starts it. It reads the tokenizer, then a grammar a line, and answers each with a line
of JSON: `problem`, "" if there is none, and `bytes`, the memory that the grammar takes. A child
compiles the grammar, makes the masks of random answers, and dies by a signal at its limit. Neither
time nor memory of llguidance is bounded otherwise: `allOf` of 20 patterns takes half a minute, and
an allocation that fails ends its process.
"""

import json
import os
import random
import resource
import signal
import sys

import numpy as np
from llguidance import LLTokenizer

from nanorchestra.engine.guide import compile_grammar, problem_of
from nanorchestra.errors import UserError

CPU_S = 1.0  # of a grammar, masks of the answers tried included
WALL_S = 20.0  # on a busy machine
MEMORY = 256 << 20  # bytes
STACK = 4 << 20  # bytes: half of what a thread of the server has
TOKENS = 64  # of an answer that is tried
ANSWERS = 2


def main() -> None:
    """Answers until its input ends."""
    backend, size, eos = json.loads(sys.stdin.buffer.readline())
    tokenizer = LLTokenizer(backend, n_vocab=size, eos_token=eos)
    os.nice(5)
    for line in sys.stdin.buffer:
        print(json.dumps(try_grammar(tokenizer, json.loads(line))), flush=True)


def try_grammar(tokenizer: LLTokenizer, lark: str) -> dict[str, str | int]:
    """Returns what a child says of a grammar, or how it died."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        trial = {"problem": "schema: it cannot be compiled", "bytes": 0}
        try:
            trial = _within_limits(tokenizer, lark)
        finally:
            os.write(writing, json.dumps(trial).encode()[:4096])
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        written = pipe.read()
    _, status = os.waitpid(child, 0)
    if not os.WIFSIGNALED(status):
        return json.loads(written)
    late = os.WTERMSIG(status) in (signal.SIGPROF, signal.SIGALRM)
    limit = f"{CPU_S:g} s" if late else f"{MEMORY >> 20} MiB"
    return {"problem": f"schema: it takes more than {limit} to compile or to follow", "bytes": 0}


def _within_limits(tokenizer, lark):
    page = os.sysconf("SC_PAGE_SIZE")
    whole, resident = _pages()
    memory = whole * page + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, STACK))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)  # the default action of both signals is death
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    try:
        matcher = compile_grammar(tokenizer, lark)
        for seed in range(ANSWERS):
            _follow(matcher.deep_copy(), random.Random(seed))
    except UserError as error:
        return {"problem": str(error), "bytes": 0}
    _, now_resident = _pages()
    return {"problem": "", "bytes": (now_resident - resident) * page}


def _follow(matcher, rng):
    """Takes random ids. UserError if the grammar meets a limit on the way."""
    for _ in range(TOKENS):
        allowed = np.flatnonzero(np.frombuffer(matcher.compute_logit_bias(), np.uint8))
        if not matcher.is_error() and matcher.is_stopped():
            return
        if matcher.is_error() or not matcher.consume_token(int(rng.choice(allowed))):
            raise UserError(problem_of(matcher))


def _pages():
    """Returns the pages of this process, all and those in memory."""
    with open("/proc/self/statm") as file:
        whole, resident, *_ = file.read().split()
    return int(whole), int(resident)


if __name__ == "__main__":
    main()
