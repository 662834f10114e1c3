"""What the gate did and how good its evidence was, measured without touching the training.

`RunSpec.diagnose` takes the names of `OBSERVED`; `RunResult.diagnostics` then has one entry a name:

- `admission`: the share of coordinates and of update energy the gate admits, by epoch and by layer, for the binary
  mask and for the smoothed coefficient;
- `reference`: against the gradient of all past rows, the harmful mass admitted and the safe mass removed, and the
  update-weighted agreement of the mask with the method's own full-data mask and with CPL's, by epoch and by layer;
- `geometry`: the binary mask on the update proposed for one fixed set of new rows, at seven states of the run;
- `coordinates`: 512 coordinates of one tensor: evidence, proposal and coefficient at a few steps;
- `audit`: with the weights frozen and the optimizer's moments advancing, how the masks of anchors, probes, their blend
  and all past rows agree, by layer and by number of anchors.

`docs/diagnostics.md` shows the shape of each entry.
"""

from cplus.diagnostics.observation import AUDITED, OBSERVED, Observation

__all__ = ["AUDITED", "OBSERVED", "Observation"]
