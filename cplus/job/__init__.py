"""The main job: adapt a model to new data, keep what it could do, and show both."""

from cplus.job.interruption import Interrupted
from cplus.job.job import Outcome, adapt, resume
from cplus.job.plan import plan
from cplus.job.settings import AdaptConfig

__all__ = ["AdaptConfig", "Interrupted", "Outcome", "adapt", "plan", "resume"]
