"""Brings arrays of the host to the device without waiting for it."""

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Returns an array of the host as a tensor on the device, which a GPU fills later."""
    return staged(values, device).to(device, non_blocking=True)


def staged(values: np.ndarray, device: torch.device) -> Tensor:
    """Returns an array as a tensor of the host from which the device can copy by itself.

    torch does not use its memory again before such a copy has ended.
    """
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" and len(values) else tensor
