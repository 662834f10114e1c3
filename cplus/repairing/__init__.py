"""Repair: undo after training the weight changes that past behaviour needs most and the new rows least."""
