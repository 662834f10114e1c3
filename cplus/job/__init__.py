"""The main job: adapt a model to new data, keep what it could do, and show both."""
