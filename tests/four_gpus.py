"""Four GPUs that are not there, each thread with a current one, as torch.cuda has it."""

from __future__ import annotations

import threading
from contextlib import contextmanager

import torch


class FourGpus(threading.local):
    """`current` is the thread's GPU, 0 until the thread changes it."""

    current = 0

    def patch(self, monkeypatch):
        """Makes torch.cuda say that they are there. Nothing can be computed on them."""
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "device", self._device)

    @contextmanager
    def _device(self, number):
        before, self.current = self.current, number
        try:
            yield
        finally:
            self.current = before
