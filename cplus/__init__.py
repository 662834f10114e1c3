"""Fine-tune a language model without breaking it: CPLUS, collaborative parameter learning using self-probes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cplus.api import encode as encode
    from cplus.api import evaluate as evaluate
    from cplus.api import probe as probe
    from cplus.api import read as read
    from cplus.api import receipt as receipt
    from cplus.attach import Guard as Guard
    from cplus.attach import protect as protect
    from cplus.job.repair.run import repair as repair
    from cplus.job.repair.settings import RepairConfig as RepairConfig
    from cplus.job.run import adapt as adapt
    from cplus.job.settings import AdaptConfig as AdaptConfig
    from cplus.methods import METHODS as METHODS
    from cplus.methods import Method as Method

__version__ = "0.1.0"

# Each public name is imported on first use, so that `cplus --help` and the JAX side never load torch.
_HOMES = {
    "AdaptConfig": "cplus.job.settings",
    "RepairConfig": "cplus.job.repair.settings",
    "adapt": "cplus.job.run",
    "repair": "cplus.job.repair.run",
    "Guard": "cplus.attach",
    "protect": "cplus.attach",
    "METHODS": "cplus.methods",
    "Method": "cplus.methods",
    "encode": "cplus.api",
    "evaluate": "cplus.api",
    "probe": "cplus.api",
    "read": "cplus.api",
    "receipt": "cplus.api",
}
__all__ = [
    "METHODS",
    "AdaptConfig",
    "Guard",
    "Method",
    "RepairConfig",
    "adapt",
    "encode",
    "evaluate",
    "probe",
    "protect",
    "read",
    "receipt",
    "repair",
]


def __getattr__(name: str) -> Any:
    if name == "optim":  # a module, so that cplus.optim.AdamW needs no import of its own
        return import_module("cplus.optim")
    if name not in _HOMES:
        raise AttributeError(f"module 'cplus' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
