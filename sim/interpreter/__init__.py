"""The numpy interpreter: a Program's numbers, for all ranks, under an adversarial scheduler."""

from __future__ import annotations

from stretto.sim.interpreter.functions import FUNCTIONS, Function
from stretto.sim.interpreter.interpret import Options, Result, interpret, interpret_sequence
from stretto.sim.interpreter.schedulers import (
    HOSTILE,
    PLAIN,
    Chosen,
    Delayed,
    InOrder,
    Manner,
    Random,
    Scheduler,
    Step,
)

__all__ = [
    "FUNCTIONS",
    "HOSTILE",
    "PLAIN",
    "Chosen",
    "Delayed",
    "Function",
    "InOrder",
    "Manner",
    "Options",
    "Random",
    "Result",
    "Scheduler",
    "Step",
    "interpret",
    "interpret_sequence",
]
