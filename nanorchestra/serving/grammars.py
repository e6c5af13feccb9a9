"""Compiles the grammars that clients send, one at a time and only those that cost little.

A process of its own tries each grammar first (grammar_worker.py). Those that pass are compiled
here, in a thread, and kept.
"""

import asyncio
import json
import os
import select
import subprocess
import sys
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from llguidance import LLMatcher
from starlette.exceptions import HTTPException

from nanorchestra.engine.guide import compile_grammar, llguidance_tokenizer
from nanorchestra.errors import UserError, require
from nanorchestra.model.tokenizer import Tokenizer
from nanorchestra.serving.grammar_worker import WALL_S

ROOT = Path(__file__).parents[2]
WAITING = 16  # grammars that may wait to be compiled
KEPT = 256  # grammars, refused ones too
KEPT_BYTES = 512 << 20  # of all that are kept
LEAST_BYTES = 1 << 20  # of one
START_S = 60.0  # that the worker may take to begin, with a large vocabulary


class Grammars:
    """Compiled grammars by their text. The event loop alone calls `compiled`."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer, self._worker = tokenizer, None
        self._kept: OrderedDict[str, tuple[LLMatcher | UserError, int]] = OrderedDict()
        self._coming: dict[str, asyncio.Future] = {}
        self._thread = ThreadPoolExecutor(1, "grammars")

    async def compiled(self, lark: str) -> LLMatcher:
        """Returns what follows a grammar; equal ones are compiled once.

        UserError if it is wrong or costs too much. HTTPException if too many wait.
        """
        if lark not in self._kept:
            if lark not in self._coming:
                if len(self._coming) >= WAITING:
                    raise HTTPException(429, "too many schemas wait to be compiled; try again")
                loop = asyncio.get_running_loop()
                self._coming[lark] = loop.run_in_executor(self._thread, self._compile, lark)
                self._coming[lark].add_done_callback(lambda done: self._keep(lark, done))
            await asyncio.wait([self._coming[lark]])
        require(lark in self._kept, "schema: it could not be compiled")
        self._kept.move_to_end(lark)
        kept, _ = self._kept[lark]
        if isinstance(kept, UserError):
            raise UserError(str(kept))
        return kept

    def close(self) -> None:
        """Ends the process."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._worker is not None:
            self._worker.kill()

    def _keep(self, lark, done):
        """Keeps what was compiled, and forgets what was not asked for longest beyond the limits."""
        del self._coming[lark]
        if done.cancelled() or done.exception():
            return
        self._kept[lark] = done.result()
        while len(self._kept) > KEPT or sum(size for _, size in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)

    def _compile(self, lark) -> tuple[LLMatcher | UserError, int]:
        """Returns a matcher or what is wrong, and its bytes. Runs in the thread."""
        try:
            trial = self._try(lark)
            if trial["problem"]:
                return UserError(trial["problem"]), len(lark)
            matcher = compile_grammar(llguidance_tokenizer(self._tokenizer), lark)
            return matcher, max(LEAST_BYTES, trial["bytes"]) + len(lark)
        except UserError as error:
            return error, len(lark)

    def _try(self, lark) -> dict:
        """Returns what the worker says of a grammar. One that does not answer is ended."""
        seconds = WALL_S + 5
        if self._worker is None or self._worker.poll() is not None:
            self._worker, seconds = self._start(), seconds + START_S
        try:
            self._worker.stdin.write(json.dumps(lark).encode() + b"\n")
            self._worker.stdin.flush()
            if select.select([self._worker.stdout], [], [], seconds)[0]:
                return json.loads(self._worker.stdout.readline())
        except (OSError, ValueError):
            pass
        self._worker.kill()
        self._worker.wait()
        return {"problem": "schema: it could not be compiled", "bytes": 0}

    def _start(self) -> subprocess.Popen:
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        more = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "RAYON_NUM_THREADS": "1"}
        worker = subprocess.Popen(
            [sys.executable, "-m", "nanorchestra.serving.grammar_worker"],
            env=os.environ | more | {"TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # what a process writes that is out of memory
        )
        tokenizer = self._tokenizer
        about = tokenizer.backend.to_str(), tokenizer.vocab_size, tokenizer.im_end
        worker.stdin.write(json.dumps(about).encode() + b"\n")
        worker.stdin.flush()
        return worker
