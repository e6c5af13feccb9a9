"""Runs train.py with a policy that draws each turn from a menu, the turns in the file $MENU.

A small policy seldom calls a tool that it does not know. This one is held to the turns by a guide.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
from pathlib import Path

import numpy as np

from nanorchestra.engine import sequence
from nanorchestra.model.tokenizer import Tokenizer

ROOT = Path(__file__).parent.parent


class Menu:
    """A guide that allows the ids of some turns and no others."""

    def __init__(self, tokenizer, turns):
        self.turns = [tokenizer.backend.encode(turn).ids for turn in turns]
        self.size, self.state = tokenizer.vocab_size, []

    def copy(self):
        other = copy.copy(self)
        other.state = []
        return other

    def advance(self, token):
        self.state.append(token)

    def allowed(self):
        mask, at = np.zeros(self.size, bool), len(self.state)
        for turn in self.turns:
            if turn[:at] == self.state and at < len(turn):
                mask[turn[at]] = True
        return mask


if __name__ == "__main__":
    menu = Menu(
        Tokenizer.from_dir(ROOT / "assets" / "nano"),
        json.loads(Path(os.environ["MENU"]).read_text()),
    )

    @dataclasses.dataclass(frozen=True)
    class SamplingParams(sequence.SamplingParams):
        guide: object = menu

    sequence.SamplingParams = SamplingParams  # before another module imports it

    import train

    train.write_report = lambda path, live: None  # it takes seconds

    sys.exit(train.main(sys.argv[1:]))
