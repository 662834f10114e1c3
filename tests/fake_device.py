"""A pretend accelerator: tensors that are on `fakegpu`, compute on the CPU, refuse mixing devices and count syncs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

NAME = "fakegpu"
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim")
"""Operations for which the host waits: it needs a value, or a shape that depends on values."""
COUNTS: Counter[str] = Counter()


def on_device(place: Any) -> bool:
    """Whether a device, by object or name, is the pretended one."""
    return place is not None and torch.device(place).type == NAME


class OnDevice(Tensor):
    """A tensor whose values another tensor holds on the CPU."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            raw.size(),
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, 0),
        )
        made.raw = raw
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.raw})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as its values, which are loaded on the host."""
        COUNTS["sync"] += 1
        return self.raw.__reduce_ex__(protocol)

    def storage(self) -> Any:
        """The memory, by which tied weights are found."""
        return self.raw.storage()

    def untyped_storage(self) -> Any:
        """The memory, by which tied weights are found."""
        return self.raw.untyped_storage()

    def data_ptr(self) -> int:
        """The memory's address."""
        return self.raw.data_ptr()

    def tolist(self) -> Any:
        """The values, for which the host waits."""
        COUNTS["sync"] += 1
        return self.raw.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def computed(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the CPU; its result is where its inputs are, or where the call says."""
    if func.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd):  # as in inference mode
        with Computing():
            return func.decompose(*args, **kwargs)
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    here = [x for x in tensors if isinstance(x, OnDevice)]
    name, to = func.overloadpacket.__name__, kwargs.get("device")
    result_here = on_device(to) if to is not None else bool(here)
    if name == "copy_":
        result_here = isinstance(args[0], OnDevice)
        _count_copy(source=isinstance(args[1], OnDevice), target=result_here)
    elif name == "_to_copy":
        _count_copy(source=bool(here), target=result_here)
    elif here and any(x.dim() > 0 for x in tensors if not isinstance(x, OnDevice)):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got {NAME}:0 and cpu")
    elif here:
        COUNTS["sync" if name in WAITS else "view" if _views(func) else "launch"] += 1
    elif result_here:
        COUNTS["factory"] += 1
    found = func(*tree_map(_raw, args), **tree_map(_raw, kwargs))
    known = {id(x.raw): x for x in here}

    def placed(x: Any) -> Any:
        if not isinstance(x, Tensor) or not result_here:
            return x
        return known.get(id(x)) if id(x) in known else OnDevice(x)

    return tree_map(placed, found)


def _views(func: Any) -> bool:
    """Whether an operation only looks at its input in another way; nothing is launched then."""
    returned = [r.alias_info for r in func._schema.returns]
    return bool(returned) and all(own is not None and not own.is_write for own in returned)


def _count_copy(*, source: bool, target: bool) -> None:
    if source != target:
        COUNTS["to device" if target else "sync"] += 1


def _raw(x: Any) -> Any:
    if isinstance(x, OnDevice):
        return x.raw
    return torch.device("cpu") if isinstance(x, torch.device) and on_device(x) else x


class Computing(TorchDispatchMode):
    """Lets factories that name the device make its tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, kwargs or {})


def _no_grad(mode: Any) -> Any:
    """In the place of inference mode, in which a wrapped tensor cannot be written."""
    mode.inside = torch.no_grad()
    return mode.inside


class Generator(torch.Generator):
    """Random numbers of the device, drawn on the CPU."""

    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls, "cpu" if on_device(device) else device)


class Module(backend_registration._DummyBackendModule):
    """What torch asks of a device's module; random numbers are drawn on the CPU."""

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(8, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        assert state.is_cpu

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


def register() -> None:
    """Make the device known; before the first backward pass, which starts autograd's threads for each device."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        backend_registration._setup_privateuseone_for_python_backend(NAME, Module())


@contextmanager
def accelerator() -> Iterator[Counter[str]]:
    """The device `fakegpu` and the counts of syncs, launches, factories and copies to it."""
    register()
    make = torch.tensor

    def tensor(data: Any, *, dtype: Any = None, device: Any = None, **rest: Any) -> Tensor:
        made = make(data, dtype=dtype, **rest)
        return made if device is None else made.to(device)

    def new_tensor(self: Tensor, data: Any, dtype: Any = None, device: Any = None, **rest: Any) -> Tensor:
        return tensor(data, dtype=dtype or self.dtype, device=device or self.device, **rest)

    def as_tensor(data: Any, dtype: Any = None, device: Any = None) -> Tensor:
        return data.to(device, dtype) if isinstance(data, Tensor) else tensor(data, dtype=dtype, device=device)

    move = torch.nn.Module.to

    def to(self: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        """Tensors of another kind are new parameters, where a GPU's keep theirs: tied ones are tied again."""
        tie: Any = getattr(move(self, *args, **kwargs), "tie_weights", None)
        if tie is not None:
            tie()
        return self

    COUNTS.clear()
    with (
        patch.object(torch.nn.Module, "to", to),
        patch.object(torch, "tensor", tensor),
        patch.object(torch, "as_tensor", as_tensor),
        patch.object(torch, "Generator", Generator),
        patch.object(Tensor, "new_tensor", new_tensor),
        patch.object(torch.inference_mode, "__enter__", lambda mode: _no_grad(mode).__enter__()),
        patch.object(torch.inference_mode, "__exit__", lambda mode, *error: mode.inside.__exit__(*error)),
        Computing(),
    ):
        yield COUNTS
