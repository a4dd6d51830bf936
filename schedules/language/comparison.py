"""How far a simulated Timeline is from a measured one, and whether both tell the same story."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from stretto.schedules.language.errors import InvalidInput
from stretto.schedules.language.timeline import Span, Timeline

__all__ = ["Comparison", "KindError", "compare_timelines"]


@dataclass(frozen=True, slots=True)
class KindError:
    """One kind of operation: median durations and the error of the prediction.

    Attributes
    ----------
    kind
        Of the operations.
    count
        How many there are.
    measured_us, simulated_us
        Median duration.
    error
        ``(simulated - measured) / measured`` of the summed durations; None if nothing took time.
    """

    kind: str
    count: int
    measured_us: float
    simulated_us: float
    error: float | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare_timelines` found.

    Attributes
    ----------
    measured_us, simulated_us
        Makespans.
    kinds
        Errors per kind of operation.
    same_operations, same_matching, same_order
        Whether both recorded the same operations, matched every wait with the same signal, and
        have the same happens-before.
    """

    measured_us: float
    simulated_us: float
    kinds: tuple[KindError, ...]
    same_operations: bool
    same_matching: bool
    same_order: bool

    @property
    def error(self) -> float:
        """Relative error of the predicted makespan; above 0 is too slow a prediction."""
        return self.simulated_us / self.measured_us - 1.0


def compare_timelines(measured: Timeline, simulated: Timeline) -> Comparison:
    """Hold a prediction against a measurement of the same Program.

    Raises
    ------
    InvalidInput
        If one of them is empty, or they are of different Programs.
    """
    if not measured.spans or not simulated.spans:
        raise InvalidInput("An empty Timeline cannot be compared.")
    for what in ("name", "variant", "world_size", "shape", "dtype"):
        one, other = getattr(measured, what), getattr(simulated, what)
        if one != other:
            raise InvalidInput(f"The Timelines differ in {what}: {one} against {other}.")
    return Comparison(
        measured_us=measured.makespan_us,
        simulated_us=simulated.makespan_us,
        kinds=tuple(
            _kind_error(kind, _of_kind(measured, kind), _of_kind(simulated, kind))
            for kind in dict.fromkeys(span.kind for span in measured.spans)
        ),
        same_operations=measured.by_key.keys() == simulated.by_key.keys(),
        same_matching=measured.matches == simulated.matches,
        same_order=measured.happens_before == simulated.happens_before,
    )


def _of_kind(timeline: Timeline, kind: str) -> list[Span]:
    return [span for span in timeline.spans if span.kind == kind]


def _kind_error(kind: str, measured: list[Span], simulated: list[Span]) -> KindError:
    total = sum(span.duration_us for span in measured)
    predicted = sum(span.duration_us for span in simulated)
    return KindError(
        kind,
        len(measured),
        median(span.duration_us for span in measured),
        median(span.duration_us for span in simulated) if simulated else 0.0,
        predicted / total - 1.0 if total > 0 else None,
    )
