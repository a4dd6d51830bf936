"""What a simulation says: times, the Timeline, and the figures that people ask for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from stretto.schedules.language import (
    FlagEvent,
    Program,
    RankShare,
    Span,
    Timeline,
)
from stretto.sim.engine.engine import Engine
from stretto.sim.engine.plan import Step
from stretto.sim.machine import Machine, Validity

__all__ = ["SimResult"]


@dataclass(frozen=True)
class SimResult:
    """One simulated execution of a Program on a machine.

    Attributes
    ----------
    program, machine
        What ran where.
    transport, mode
        Name of the backend in the profile; ``eager`` or ``graph``.
    roof_us
        Lower bound for the machine's own numbers (see `stretto.sim.roof_us`).
    validity
        Of the least certain number that went in: ``measured``, ``interpolated``,
        ``extrapolated`` or ``not validated``.
    unfused_us
        Makespan of the unfused baseline, None if the schedule has none or it was not asked for.
    unfused_transport
        The baseline's transport.
    engine
        The finished engine, from which the Timeline is made when asked for.
    """

    program: Program
    machine: Machine
    transport: str
    mode: str
    roof_us: float
    validity: Validity
    engine: Engine
    unfused_us: float | None = None
    unfused_transport: str | None = None

    @cached_property
    def makespan_us(self) -> float:
        """From the first begin to the last end of any rank, in microseconds."""
        states = self.engine.ranks.values()
        start = min(
            (min(starts) for state in states for starts in state.starts if starts), default=0.0
        )
        end = max(
            (
                max(end for end in ends if end is not None)
                for state in states
                for ends in state.ends
                if ends
            ),
            default=0.0,
        )
        return end - start

    @property
    def regret(self) -> float:
        """Time over roof, as a fraction of the roof."""
        return self.makespan_us / self.roof_us - 1.0 if self.roof_us else 0.0

    @property
    def overlap_efficiency(self) -> float | None:
        """``(unfused - t) / (unfused - roof)``; None where there is nothing to save."""
        if self.unfused_us is None or self.unfused_us <= self.roof_us:
            return None
        return (self.unfused_us - self.makespan_us) / (self.unfused_us - self.roof_us)

    @property
    def shares(self) -> tuple[RankShare, ...]:
        """How every rank spent the makespan."""
        return self.timeline.shares

    @cached_property
    def timeline(self) -> Timeline:
        """The spans of all ranks."""
        program = self.program
        return Timeline(
            name=program.name,
            variant=program.variant,
            world_size=program.world_size,
            shape=program.shape,
            dtype=program.dtype,
            transport=self.transport,
            origin="simulated",
            machine=self.machine.name,
            spans=tuple(self._spans()),
            roof_us=self.roof_us,
            validity=self.validity,
        )

    def _spans(self) -> list[Span]:
        engine, program = self.engine, self.program
        spans = []
        for number, call in enumerate(engine.calls):
            for rank in range(program.world_size):
                simulated = 0 if engine.plan.folded else rank
                starts = engine.ranks[simulated].starts[number]
                ends = engine.ranks[simulated].ends[number]
                body = call.phase.body(rank)
                tags = {operation.id: operation.tags for operation in body.operations}
                after = {operation.id: operation.after for operation in body.operations}
                for stream, steps in engine.plans[number][simulated].streams.items():
                    for step in steps:
                        end = ends[step.index]
                        tag = tags.get(step.id) or tags[step.id.split("/")[0]]
                        spans.append(
                            Span(
                                operation=step.id,
                                kind=step.kind,
                                rank=rank,
                                stream=stream,
                                call=call.number,
                                start_us=starts[step.index],
                                end_us=starts[step.index] if end is None else end,
                                step=tag.step,
                                shard=None
                                if tag.shard is None
                                else tag.shard.of(rank, program.world_size),
                                peer=self._turned(step.peer, rank),
                                note=tag.note,
                                bytes=step.moved_bytes,
                                flops=step.flops,
                                after=after.get(step.id, ()),
                                signalled=self._events(step, rank, call.number, signal=True),
                                awaited=self._events(step, rank, call.number, signal=False),
                            )
                        )
        return spans

    def _turned(self, peer: int | None, rank: int) -> int | None:
        """Return the peer of `rank` where rank 0 was simulated for all."""
        if peer is None or not self.engine.plan.folded:
            return peer
        return (peer + rank) % self.program.world_size

    def _events(self, step: Step, rank: int, number: int, *, signal: bool) -> tuple[FlagEvent, ...]:
        """Return the words of a step, with values; resolved anew where rank 0 stood for all."""
        syncs = step.signals if signal else step.waits
        if self.engine.plan.folded and syncs:
            return self._resolved_events(step, rank, number, signal=signal)
        return tuple(
            FlagEvent(
                sync.key[0],
                sync.key[1],
                (number + sync.slot) % sync.slots,
                sync.key[2],
                (sync.stride * number + sync.offset) & 0xFFFFFFFF,
            )
            for sync in syncs
        )

    def _resolved_events(
        self, step: Step, rank: int, number: int, *, signal: bool
    ) -> tuple[FlagEvent, ...]:
        program = self.program
        operation: Any = self._operation(step.id, number)
        events = []
        for sync in operation.signals() if signal else operation.waits():
            flag = program.flag[sync.word.flag]
            word = sync.word.resolve(flag, rank=rank, world_size=program.world_size, call=number)
            value = sync.value.at(number) & 0xFFFFFFFF
            events.append(FlagEvent(word.flag, word.home, word.slot, word.position, value))
        return tuple(events)

    def _operation(self, id: str, number: int) -> Any:
        body = self.engine.calls[number].phase.body(0)
        if id in body.index:
            return body[id]
        fused: Any = body[id.split("/")[0]]
        return next(part for part in fused.parts() if part.id == id)
