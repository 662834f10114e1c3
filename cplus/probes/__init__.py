"""Self-probe banks: generate, label, seal, audit."""
