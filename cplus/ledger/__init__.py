"""A model updated again and again: one folder a stage, each sealed to the one before it."""

DECIDED = ("out", "split", "num_new", "kept", "compare", "bank", "external_limit")
"""Settings of `cplus adapt` that an update decides itself."""
