"""A Timeline in words and numbers: what figures print above their axes, and tables as rows."""

from __future__ import annotations

from stretto.figures.style import long_number
from stretto.schedules.language import RankShare, Timeline

__all__ = ["conditions", "headline", "key_numbers", "regret_percent", "summary_rows"]

_RANKS_LISTED = 16


def headline(timeline: Timeline) -> str:
    """Return what was run and how the times came about: ``ag-gemm/ring, TP4, measured``."""
    variant = f"/{timeline.variant}" if timeline.variant else ""
    return f"{timeline.name}{variant}, TP{timeline.world_size}, {timeline.origin}"


def conditions(timeline: Timeline) -> tuple[str, ...]:
    """Return shape, dtype, transport, machine, and how far the times can be trusted."""
    trust = {
        "measured": f"clock error {_us(timeline.clock_error_us)}",
        "simulated": f"validity: {timeline.validity or 'not stated'}",
        "counterexample": timeline.validity or "",
    }[timeline.origin]
    sizes = (f"{name} {size}" for name, size in timeline.shape)
    known = (*sizes, timeline.dtype, timeline.transport, timeline.machine, trust)
    return tuple(text for text in known if text)


def key_numbers(timeline: Timeline) -> tuple[str, ...]:
    """Return makespan, roof, regret and exposed communication, as far as they are known.

    Of a counterexample, which has no times, there are none.
    """
    if timeline.origin == "counterexample":
        return ()
    numbers = [f"makespan {_us(timeline.makespan_us)}"]
    if timeline.roof_us is not None:
        numbers.append(f"roof {_us(timeline.roof_us)}")
    regret = regret_percent(timeline)
    if regret is not None:
        numbers.append(f"regret {regret:.1f} %")
    return (*numbers, f"exposed {_us(timeline.exposed_comm_us)}")


def regret_percent(timeline: Timeline) -> float | None:
    """Return by how much the makespan exceeds the roof; None if there is no roof to compare with.

    Below zero means that the roof was worked out from a GEMM that was not the best one.
    """
    if not timeline.roof_us:
        return None
    return (timeline.makespan_us / timeline.roof_us - 1.0) * 100.0


def summary_rows(timeline: Timeline) -> list[tuple[str, str]]:
    """Return label and value of everything that a table about one Timeline shows.

    Of more than 16 ranks only those with the least, the median and the most exposed communication
    are listed; `Timeline.shares` has them all.  A counterexample has no numbers.
    """
    if timeline.origin == "counterexample":
        return [
            ("schedule", headline(timeline)),
            ("conditions", ", ".join(conditions(timeline))),
            *(("marked", f"{one.name}, rank {one.rank}: {one.role}") for one in timeline.marks),
            *(("note", note) for note in timeline.notes),
        ]
    regret = regret_percent(timeline)
    rows = [
        ("schedule", headline(timeline)),
        ("conditions", ", ".join(conditions(timeline))),
        ("makespan", _us(timeline.makespan_us)),
        ("roof", "not known" if timeline.roof_us is None else _us(timeline.roof_us)),
        ("regret", "not known" if regret is None else f"{regret:.1f} %"),
        ("exposed communication", _us(timeline.exposed_comm_us)),
    ]
    shares = timeline.shares
    if len(shares) <= _RANKS_LISTED:
        rows += [(f"rank {share.rank}", _share(share, timeline.makespan_us)) for share in shares]
    else:
        ordered = sorted(shares, key=lambda share: (share.exposed_comm_us, share.rank))
        for what, share in (
            ("least exposed", ordered[0]),
            ("median exposed", ordered[len(ordered) // 2]),
            ("most exposed", ordered[-1]),
        ):
            rows.append((f"{what}, rank {share.rank}", _share(share, timeline.makespan_us)))
    return rows + [("note", note) for note in timeline.notes]


def _share(share: RankShare, makespan_us: float) -> str:
    parts = (
        ("compute", share.compute_us),
        ("exposed", share.exposed_comm_us),
        ("idle", share.idle_us),
    )
    return ", ".join(
        f"{name} {_us(part)} ({100.0 * part / makespan_us if makespan_us else 0.0:.1f} %)"
        for name, part in parts
    )


def _us(value: float) -> str:
    return f"{long_number(value)} µs"
