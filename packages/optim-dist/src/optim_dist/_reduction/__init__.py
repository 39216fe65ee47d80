"""Gradients and parameters between ranks: the collectives, and what is reduced and gathered by them when."""
