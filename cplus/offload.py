"""Where the vectors of a projection are kept: on the device, there in half precision, or so in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cplus.cost import TRAINING_RESERVE
from cplus.environment import free_memory


@dataclass(frozen=True, kw_only=True)
class Storage:
    """The device and the precision of stored vectors."""

    device: torch.device
    dtype: torch.dtype

    @property
    def tolerance(self) -> float:
        """The share of a vector's length that may be rounding left over from others, so that it depends on them."""
        return 1e-6 if self.dtype == torch.float32 else 1e-2

    def stored(self, vector: Sequence[Tensor]) -> list[Tensor]:
        """The vector as it is kept; itself where nothing changes."""
        return [v.to(self.device, self.dtype) for v in vector]


def free_bytes(device: torch.device) -> int:
    """Free bytes on a device, with what torch holds there unused."""
    if device.type != "cuda":
        return free_memory()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def storage(
    count: int,
    params: Sequence[Tensor],
    *,
    there: int = 0,
    free: Callable[[torch.device], int] = free_bytes,
) -> Storage:
    """Where `count` vectors of these parameters fit; `there` bytes of them are already on the device.

    In half precision they are bfloat16: a unit vector of many coordinates is too small for float16.
    """
    numbers, device, host = sum(p.numel() for p in params), params[0].device, torch.device("cpu")
    room = free(device) + there - TRAINING_RESERVE * numbers
    for dtype, each in ((torch.float32, 4), (torch.bfloat16, 2)):
        if count * numbers * each <= room:
            return Storage(device=device, dtype=params[0].dtype if dtype is torch.float32 else dtype)
    if device != host and 2 * count * numbers <= free(host):
        return Storage(device=host, dtype=torch.bfloat16)
    need, names = 2 * count * numbers / 1e9, "its device" if device == host else f"{device} and the host"
    raise ValueError(
        f"this projection keeps {count} gradients: in half precision they need {need:.1f} GB, and beside the training "
        f"{max(0, room) / 1e9:.1f} GB are free on {names}; use fewer anchors or a machine with more memory"
    )
