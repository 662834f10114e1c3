"""What a model thinks of answers, and what it answers: likelihoods, greedy decoding, predictions."""

from cplus.scoring.decoding import Generation, greedy
from cplus.scoring.likelihoods import Score, log_likelihoods, score_candidates
from cplus.scoring.predict import fitting, predict

__all__ = ["Generation", "Score", "fitting", "greedy", "log_likelihoods", "predict", "score_candidates"]
