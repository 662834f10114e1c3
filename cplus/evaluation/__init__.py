"""What was kept, lost and learned: pure functions of predictions, without torch."""

from cplus.evaluation.changes import Flip as Flip
from cplus.evaluation.changes import acquisition as acquisition
from cplus.evaluation.changes import average_task_accuracy as average_task_accuracy
from cplus.evaluation.changes import correction as correction
from cplus.evaluation.changes import flips as flips
from cplus.evaluation.changes import percent as percent
from cplus.evaluation.changes import recovery as recovery
from cplus.evaluation.changes import retention as retention
from cplus.evaluation.statistics import Estimate as Estimate
from cplus.evaluation.statistics import Rate as Rate
from cplus.evaluation.statistics import estimate as estimate
from cplus.evaluation.statistics import mcnemar as mcnemar
