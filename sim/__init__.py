"""Simulated time: machine profiles, cost models and the engine."""
