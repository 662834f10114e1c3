"""Fine-tune a language model without breaking it: CPLUS, collaborative parameter learning using self-probes."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cplus.attach import Guard as Guard
    from cplus.attach import protect as protect
    from cplus.config import AdaptConfig as AdaptConfig
    from cplus.jobs import adapt as adapt
    from cplus.methods import METHODS as METHODS
    from cplus.methods import Method as Method
    from cplus.setting import encode as encode

__version__ = "0.1.0"

# Each public name is imported on first use, so that `cplus --help` and the JAX side never load torch.
_HOMES = {
    "AdaptConfig": "cplus.config",
    "adapt": "cplus.jobs",
    "Guard": "cplus.attach",
    "protect": "cplus.attach",
    "METHODS": "cplus.methods",
    "Method": "cplus.methods",
    "encode": "cplus.setting",
}
__all__ = ["METHODS", "AdaptConfig", "Guard", "Method", "adapt", "encode", "protect"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cplus' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)
