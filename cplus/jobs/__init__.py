"""The main job: adapt a model to new data, keep what it could do, and show both."""

from cplus.config import AdaptConfig
from cplus.jobs.interruption import Interrupted
from cplus.jobs.job import Outcome, adapt, resume
from cplus.jobs.plan import plan

__all__ = ["AdaptConfig", "Interrupted", "Outcome", "adapt", "plan", "resume"]
