"""Likelihoods of given answers, greedy decoding, and a model's predictions."""

from cplus.scoring.decoding import Generation, greedy
from cplus.scoring.likelihoods import Reading, Score, log_likelihoods, read_targets, score_candidates
from cplus.scoring.predict import Judge, fitting, predict, repeated

__all__ = [
    "Generation",
    "Judge",
    "Reading",
    "Score",
    "fitting",
    "greedy",
    "log_likelihoods",
    "predict",
    "read_targets",
    "repeated",
    "score_candidates",
]
