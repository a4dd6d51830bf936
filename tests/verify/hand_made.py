"""Programs written out operation by operation, to make one mistake at a time."""

from __future__ import annotations

from stretto.schedules import SCHEDULES, schedule_class
from stretto.schedules.language import (
    ALL_COLLECTIVES,
    ALL_VERBS,
    Body,
    Buffer,
    Capabilities,
    Copy,
    Extent,
    Fixed,
    Flag,
    FlagRef,
    Operation,
    Peer,
    Phase,
    Program,
    Put,
    Schedule,
    View,
    Wait,
)
from stretto.schedules.verifier import Finding, Verdict, verify

CAPABILITIES = Capabilities("test", ALL_VERBS, ALL_COLLECTIVES, signal_orders_puts=True)
VARIANTS = SCHEDULES["ag-gemm"]
NEXT = Peer(1)

BUFFERS = (
    Buffer("x", "input", "fp32", Extent(4), Extent(2), initial="caller"),
    Buffer("w", "weight", "fp32", Extent(2), Extent(2), initial="caller", reuse="never"),
    Buffer("y", "output", "fp32", Extent(4), Extent(2), initial="zero", reuse="never"),
    Buffer("g", "workspace", "fp32", Extent(4), Extent(2), "symmetric"),
    Buffer("s", "workspace", "fp32", Extent(4), Extent(2), initial="zero"),
)
FLAGS = (
    Flag("epoch", count=2),
    Flag("counter", "counter"),
    Flag("mailbox", "mailbox", count=2),
)


def made(
    *operations: Operation,
    others: tuple[Operation, ...] | None = None,
    tp: int = 2,
    buffers: tuple[Buffer, ...] = BUFFERS,
    flags: tuple[Flag, ...] = FLAGS,
) -> Program:
    """Return a Program of these operations on all ranks, or of `others` on all but rank 0."""
    bodies = (Body(operations),) if others is None else (Body(operations), Body(others))
    body_of = () if others is None else (0,) + (1,) * (tp - 1)
    return Program(
        name="made",
        variant="by-hand",
        world_size=tp,
        shape=(("m", 4),),
        dtype="fp32",
        transport="test",
        buffers=buffers,
        flags=flags,
        phases=(Phase("call", bodies, body_of),),
    )


def rows(buffer: str, start: int = 0, stop: int = 4, *, on: int = 0) -> View:
    return View(buffer, Fixed(start, stop), on=Peer(on))


def word(flag: str = "epoch", index: int = 0, *, on: int = 0) -> FlagRef:
    return FlagRef(flag, index, Peer(on))


def put(id: str = "put0", *, stream: str = "send", **changes: object) -> Put:
    fields = {
        "source": rows("x", 0, 2),
        "destination": rows("g", 0, 2, on=1),
        "signal": word(on=1),
        **changes,
    }
    return Put(id=id, stream=stream, **fields)  # type: ignore[arg-type]


def wait(id: str = "wait0", *, stream: str = "receive", **changes: object) -> Wait:
    fields = {"words": (word(),), **changes}
    return Wait(id=id, stream=stream, **fields)  # type: ignore[arg-type]


def copy(id: str = "copy0", *, stream: str = "compute", **changes: object) -> Copy:
    fields = {"source": rows("g", 0, 2), "destination": rows("y", 0, 2), **changes}
    return Copy(id=id, stream=stream, **fields)  # type: ignore[arg-type]


def found(program: Program | list[Program], kind: str, **options: object) -> Finding:
    """Verify, and return the one error of this kind (there may be others of other kinds)."""
    verdict = verify(program, **options)  # type: ignore[arg-type]
    assert not verdict.safe
    errors = [finding for finding in verdict.errors if finding.kind == kind]
    assert errors, [finding.kind for finding in verdict.errors]
    return errors[0]


def kinds(verdict: Verdict) -> set[str]:
    return {finding.kind for finding in verdict.errors}


def build(
    variant: str | type[Schedule] = "ring", tp: int = 4, m: int | None = None, *, slots: int = 2
) -> Program:
    cls = schedule_class("ag-gemm", variant) if isinstance(variant, str) else variant
    if slots != cls.slots:
        cls = type(cls.__name__, (cls,), {"slots": slots})
    rows_ = 3 * tp if m is None else m
    return cls(world_size=tp, m=rows_, n=2, k=2, dtype="fp32", capabilities=CAPABILITIES).build()
