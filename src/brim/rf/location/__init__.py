"""Positions from observations: the solver, the network, their training and evaluation."""
