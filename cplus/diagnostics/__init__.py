"""What the gate did and how good its evidence was, measured without changing the training.

`RunSpec.diagnose` takes the names of `OBSERVED`; `RunResult.diagnostics` then has one entry per name:

- `admission`: the share of coordinates and of update energy that the gate admits, by epoch and by layer, for the binary
  mask and for the smoothed coefficient;
- `reference`: the harmful mass admitted and the safe mass removed, judged by the gradient of all past rows, and the
  update-weighted agreement of the mask with the method's own full-data mask and with CPL's, by epoch and by layer;
- `geometry`: the binary mask on the update proposed for a fixed set of new rows, at seven points of the run;
- `coordinates`: evidence, proposal and coefficient of 512 coordinates of one tensor, at a few steps;
- `audit`: the agreement between the masks of anchors, probes, their blend and all past rows, by layer and by number of
  anchors, with the weights frozen and the optimizer's moments advancing.

`docs/diagnostics.md` shows the shape of each entry.
"""

from cplus.diagnostics.observation import AUDITED, OBSERVED, Observation

__all__ = ["AUDITED", "OBSERVED", "Observation"]
