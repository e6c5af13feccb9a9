"""Brings a model to all nodes of a training before its ranks load it."""

import os
from typing import Any

from nanorchestra import formats

DOWNLOAD_S = 24 * 3600.0  # that ranks wait for the download of another one


def fetch(word: str, ranks: Any) -> str:
    """Returns the word, a hub id with its commit, once the model is on every node. UserError.

    One rank of a node downloads it, or converts a GGUF file. All ranks, of the class
    training.distributed.Ranks, call this.
    """
    name = ranks.broadcast(formats.pinned(word) if ranks.first else "")
    waiting = ranks.with_own_group(DOWNLOAD_S)
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:
        formats.directory_of(name)
    waiting.barrier()
    return name
