"""Faults on purpose: every command that writes, under every fault; `python -m faults` prints the matrix."""
