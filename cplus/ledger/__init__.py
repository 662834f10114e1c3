"""Repeated updates of a model: one folder per stage, each sealed to the one before it."""

DECIDED = ("out", "split", "num_new", "kept", "compare", "bank", "external_limit", "keep")
"""Settings of `cplus adapt` that an update sets itself."""
