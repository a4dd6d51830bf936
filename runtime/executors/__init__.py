"""Executors: who runs an `Executable`, one file a kind of device."""
