"""Learner and server that keep every contract of the real ones with supervisor, storage and each other; no model inside."""
