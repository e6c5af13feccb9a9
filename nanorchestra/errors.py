"""The errors that commands turn into one line and a non-zero exit."""

from __future__ import annotations


class UserError(Exception):
    """Something the user gave is wrong. The message is one line: which file, field and value, and what would be right."""


class NotFinite(UserError, FloatingPointError):
    """A model that computes NaN or infinity."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not finite: a weight is NaN or infinite, or an activation overflowed; another checkpoint is needed"
        )
