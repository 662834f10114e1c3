"""Figures, tables and comparison with the paper, one module per study, from JSON records alone, without torch."""
