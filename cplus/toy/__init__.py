"""The built-in world and the language models that know it."""

NAMES = ("toy-s", "toy", "toy-l")
