"""The studies' figures, tables and report: from JSON records alone, without torch."""
