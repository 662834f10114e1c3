"""Fine-tune a language model without breaking it: CPLUS, collaborative parameter learning using self-probes."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cplus.core.guard import Guard, protect
    from cplus.jobs.adapt import adapt
    from cplus.jobs.api import encode, evaluate, probe, read, receipt
    from cplus.jobs.repair import repair
    from cplus.jobs.settings import AdaptConfig, RepairConfig
    from cplus.methods.table import METHODS, Method

__all__ = [
    "METHODS", "AdaptConfig", "Guard", "Method", "RepairConfig", "adapt", "encode", "evaluate", "probe", "protect",
    "read", "receipt", "repair",
]  # fmt: skip
__version__ = "0.1.0"

# Each public name is imported on first use, so that `cplus --help` and the JAX side never load torch.
_PUBLIC = {
    "cplus.core.guard": ("Guard", "protect"),
    "cplus.jobs.adapt": ("adapt",),
    "cplus.jobs.api": ("encode", "evaluate", "probe", "read", "receipt"),
    "cplus.jobs.repair": ("repair",),
    "cplus.jobs.settings": ("AdaptConfig", "RepairConfig"),
    "cplus.methods.table": ("METHODS", "Method"),
}
_HOMES = {name: home for home, names in _PUBLIC.items() for name in names}


# Modules under the names by which documentation and users import them.
_ALIASES = {
    "cplus.cost": "cplus.base.cost",
    "cplus.data.encoded": "cplus.core.rows",
    "cplus.gates": "cplus.core.gates",
    "cplus.integrations.distributed": "cplus.distributed.checkpoint",
    "cplus.integrations.jax_loop": "cplus.integrations.optax",
    "cplus.integrations.peft": "cplus.integrations.transformers",
    "cplus.interfaces": "cplus.data.interfaces",
    "cplus.job": "cplus.jobs",
    "cplus.job.plan": "cplus.jobs.plan",
    "cplus.loop": "cplus.training.loop",
    "cplus.losses": "cplus.core.losses",
    "cplus.masters": "cplus.core.optim",
    "cplus.models.identity": "cplus.models.loading",
    "cplus.optim": "cplus.core.optim",
    "cplus.probes.generate": "cplus.probes.writing",
    "cplus.receipts.receipt": "cplus.receipts.page",
    "cplus.repairing": "cplus.methods",
    "cplus.repairing.model": "cplus.methods.repair",
    "cplus.scoring": "cplus.models.scoring",
}


class _Aliases(MetaPathFinder, Loader):
    """Imports a module under its other name; it is loaded once, whichever name is used."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname in _ALIASES else None

    def exec_module(self, module: Any) -> None:
        sys.modules[module.__name__] = import_module(_ALIASES[module.__name__])


sys.meta_path.insert(0, _Aliases())
import_module("cplus.toy.world")  # registers its tasks


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def __getattr__(name: str) -> Any:
    if f"cplus.{name}" in _ALIASES:  # so that cplus.optim.AdamW needs no import of its own
        return import_module(f"cplus.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'cplus' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
