"""Transports: put, signal, wait and collective, one file a backend."""
