"""The speed of this device at the work of a small batch: the basis of estimates before any run is finished."""

from __future__ import annotations

import time

import torch

from cplus import models

TOKENS, WIDTH, INNER = 110, 512, 2048
SECONDS = 0.2


def measured_speed(device: str = "auto") -> tuple[float, str]:
    """FLOPs per second of the products of a transformer's layer for one row, forward and backward, and the device.

    One row at a time is what the paper trains on; a GPU does far more per second on larger batches.
    """
    where = models.choose_device(device)
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    up, down = (torch.randn(shape, device=where, dtype=dtype) for shape in ((WIDTH, INNER), (INNER, WIDTH)))
    x = torch.randn((TOKENS, WIDTH), device=where, dtype=dtype)
    done, begun = 0, 0.0
    for number in range(10_000):
        y = x @ up @ down
        y @ down.T @ up.T
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        if number == 2:  # the first products wait for memory and kernels
            begun = time.perf_counter()
        elif number > 2:
            done += 1
            if time.perf_counter() - begun > SECONDS:
                break
    each = 2 * 4 * TOKENS * WIDTH * INNER
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else f"{torch.get_num_threads()} threads"
    return done * each / (time.perf_counter() - begun), name
