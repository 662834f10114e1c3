"""Figures and pages from records; nothing here imports torch."""
