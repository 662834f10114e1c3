"""Training a tiny model in one process or in two real ones over gloo, and what is written down of it."""

from __future__ import annotations

import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import tiny
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW, Optimizer

from cplus.core import algorithm
from cplus.core.engine import bare
from cplus.core.evidence import MeanGradient, Source
from cplus.core.gates import Collaborative, Proposal, Uses
from cplus.core.guard import Guard
from cplus.core.losses import answer_losses
from cplus.distributed import checkpoint

STEPS, EPOCH, BATCH, HALF = 50, 10, 8, 25
SOURCES = (
    Source(name="anchors", weight=0.5, rows=tiny.rows(5, seed=1)),
    Source(name="probes", weight=0.5, rows=tiny.rows(17, seed=2)),
)
NEW = tiny.rows(BATCH * EPOCH, seed=4)


@dataclass
class Recorder:
    """The paper's gate, and beside it what each step's mask was made of."""

    inner: Collaborative = field(default_factory=lambda: Collaborative(beta=0.9))
    steps: list[list[tuple[Tensor, Tensor, Tensor]]] = field(default_factory=list)
    uses: Uses = "values"  # keep the evidence whole, to see how near to zero it was
    whole: bool = False
    average: None = None

    def coefficients(self, proposals: Sequence[Proposal]) -> Iterator[Tensor]:
        self.steps.append([(algorithm.collaborates(p.sign, p.delta), p.sign.clone(), p.delta) for p in proposals])
        return self.inner.coefficients(proposals)

    def tally(self) -> tuple[int, int]:
        return self.inner.tally()

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any], params: Sequence[Tensor]) -> None:
        self.inner.load_state_dict(state, params)


def build(wrap: Callable[[nn.Module], nn.Module], dtype: torch.dtype) -> tuple[nn.Module, Optimizer, Guard]:
    """The same model, optimizer and guard everywhere."""
    model = wrap(tiny.lm().to(dtype))
    optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    evidence = MeanGradient(model=bare(model), sources=SOURCES, max_tokens=48)
    return model, optimizer, Guard(optimizer, model, evidence=evidence, gate=Recorder())


def train(model: nn.Module, optimizer: Optimizer, guard: Guard, first: int, last: int) -> None:
    """Steps `first` to `last`, each process on its share of the batch."""
    for step in range(first, last + 1):
        if (step - 1) % EPOCH == 0:
            guard.refresh()
        rows = guard.engine.rows(NEW[(step - 1) % EPOCH * BATCH :][:BATCH])
        optimizer.zero_grad()
        answer_losses(model, rows).mean().backward()  # through the wrapper, which reduces the gradient
        optimizer.step()


def sharded(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def keep(model: nn.Module, optimizer: Optimizer, guard: Guard, folder: Path) -> None:
    """A distributed checkpoint of everything."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(state, checkpoint_id=folder / "training", no_dist=not dist.is_initialized())
    checkpoint.save(guard, folder / "guard")


def take_up(model: nn.Module, optimizer: Optimizer, guard: Guard, folder: Path) -> None:
    """Read a checkpoint of any number of processes."""
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.load(state, checkpoint_id=folder / "training", no_dist=not dist.is_initialized())
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    checkpoint.load(guard, folder / "guard")


def whole(model: nn.Module) -> list[Tensor]:
    params = [p.detach() for p in model.parameters()]
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.clone() for p in params]


def launch(work: Callable[[int, Path], None], folder: Path, world: int = 2) -> None:
    """Run `work(rank, folder)` in real processes that form a gloo group: forks of one that has everything imported."""
    code = "import sys, importlib, two_ranks; two_ranks.fork(importlib.import_module(sys.argv[1]).work, *sys.argv[2:])"
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code, work.__module__, str(folder), str(world)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-5000:]


def fork(work: Callable[[int, Path], None], folder: str, world: str) -> None:
    """The processes of the group; the exit code tells whether all of them ended well."""
    pids = [os.fork() or _entry(rank, int(world), work, Path(folder)) for rank in range(int(world))]
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    sys.exit(any(statuses))


def _entry(rank: int, world: int, work: Callable[[int, Path], None], folder: Path) -> NoReturn:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # Accelerate asks for them, the file serves
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=world)
    code = 1
    try:
        work(rank, folder)
        dist.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
