"""Writes the report of a run again and again while it goes on, and measures its memory."""

import math
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

from nanorchestra.report.run import Run

ROOT = Path(__file__).resolve().parents[2]


class Watch:
    """On the rank that writes. `every`: seconds between two reports, 0 for none during the run."""

    def __init__(self, run: Run, every: float = 0.0) -> None:
        self.run, self.every = run, every
        self._begun = -math.inf
        self._writer: subprocess.Popen | None = None

    def report(self) -> None:
        """Begin to write the report if it is time, as after the first step; called at every step.

        A process of the lowest priority writes it, one at a time: a thread would take seconds of
        Python from the rollouts. The first one has the run's priority, so that it is there soon.
        """
        waited = time.monotonic() - self._begun
        writing = self._writer and self._writer.poll() is None
        if not self.every or waited < self.every or writing:
            return
        niceness = "19" if self._writer else "0"
        self._begun = time.monotonic()
        module = "nanorchestra.report.page"
        self._writer = subprocess.Popen(
            ["nice", "-n", niceness, sys.executable, "-m", module, self.run.path.resolve()],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run
        )

    def close(self) -> None:
        """End a report that is being written, before the last one is."""
        if self._writer:
            self._writer.terminate()
            self._writer.wait()


def peak_memory_mb() -> float:
    """Return the peak memory of this process so far, in MB of 2^20 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
