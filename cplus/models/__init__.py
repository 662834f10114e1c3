"""Loading models by name, identifying them by fingerprint, and saving them."""

from cplus.models.identity import fingerprint
from cplus.models.loading import ALIASES, Loaded, as_dtype, choose_device, computing, load, of, resolve, save, window
from cplus.models.presets import PRESETS, Preset

__all__ = [
    "ALIASES",
    "PRESETS",
    "Loaded",
    "Preset",
    "as_dtype",
    "choose_device",
    "computing",
    "fingerprint",
    "load",
    "of",
    "resolve",
    "save",
    "window",
]
