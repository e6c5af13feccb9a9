"""A guide that holds a policy to a menu of turns.

A small policy seldom calls a tool that it does not know.
"""

from __future__ import annotations

import copy

import numpy as np


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
