"""Benchmarks: each module states its protocol first."""
