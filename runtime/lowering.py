"""Lowering: a Program becomes a flat list of launches with every address resolved.

One list for each slot residue (`Program.slot_period`), since addresses differ by slot and by
nothing else.  A launch takes the workspace's use count; everything else is bound already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from stretto.runtime.gemm import GemmProvider
from stretto.runtime.tensors import memory_of, tensor_at
from stretto.schedules.language import (
    Body,
    Buffer,
    Collective,
    Copy,
    Fill,
    FlagEvent,
    Gemm,
    InvalidInput,
    Operation,
    Program,
    Put,
    Reduce,
    RowOp,
    Signal,
    Sync,
    Unsupported,
    View,
    Wait,
)
from stretto.transports.interface import Label, Launch, Memory, Transport, Workspace

__all__ = ["Executable", "LoweredOperation", "lower"]


@dataclass(frozen=True, slots=True)
class LoweredOperation:
    """One operation of one rank, ready to be launched.

    Attributes
    ----------
    operation
        What it is in the Program.
    launches
        By slot residue of the call.
    moved_bytes, flops, peer
        For the record.
    after
        Places, in enqueue order, of the operations of other streams that it waits for.
    entry
        Whether it starts only after the caller's earlier work.
    """

    operation: Operation
    launches: tuple[Launch, ...]
    moved_bytes: int
    flops: float
    peer: int | None
    after: tuple[int, ...]
    entry: bool


@dataclass(frozen=True, slots=True)
class Executable:
    """A Program lowered for one rank, one workspace and one set of tensors.

    Attributes
    ----------
    program, rank
        What was lowered, for whom.
    phases
        The operations of each phase, in enqueue order.
    exits
        For each phase, places of the operations that the caller's later work follows.
    tensors
        The local tensors, by buffer; the caller's are the caller's own.
    """

    program: Program
    rank: int
    phases: tuple[tuple[LoweredOperation, ...], ...]
    exits: tuple[tuple[int, ...], ...]
    tensors: Mapping[str, Any]

    def sync_events(
        self, operation: Operation, call: int, seen: Sequence[int] = ()
    ) -> tuple[tuple[FlagEvent, ...], tuple[FlagEvent, ...]]:
        """Return what an operation signalled and awaited in a call, for the record."""
        signalled = tuple(self._event(sync, call, None) for sync in operation.signals())
        waits = operation.waits()
        values: Sequence[int | None] = seen if len(seen) == len(waits) else [None] * len(waits)
        awaited = tuple(
            self._event(sync, call, value) for sync, value in zip(waits, values, strict=True)
        )
        return signalled, awaited

    def _event(self, sync: Sync, call: int, seen: int | None) -> FlagEvent:
        program = self.program
        word = sync.word.resolve(
            program.flag[sync.word.flag],
            rank=self.rank,
            world_size=program.world_size,
            call=call,
        )
        value = sync.value.at(call) & 0xFFFFFFFF
        return FlagEvent(word.flag, word.home, word.slot, word.position, value, seen)


def lower(
    program: Program,
    *,
    transport: Transport,
    workspace: Workspace | None,
    tensors: Mapping[str, Any],
    gemm: GemmProvider,
    streams: Mapping[str, Any] | None = None,
) -> Executable:
    """Resolve every address of `program` for this rank.

    Parameters
    ----------
    program
        To be lowered.
    transport, workspace
        Who carries it, and the symmetric memory; None where the Program has none.
    tensors
        The caller's tensors by buffer name, row-major; shapes are those that `program` states for
        this rank (a short shard's tensor may have just its valid rows).
    gemm
        Who prepares GEMMs.
    streams
        What the transport's verbs get as their stream, by the Program's names; the names
        themselves if None.

    Raises
    ------
    InvalidInput
        If a tensor is missing or has another shape, dtype or layout.
    Unsupported
        If an operation has no implementation here.
    """
    lowering = _Lowering(program, transport, workspace, tensors, gemm, streams)
    return Executable(
        program,
        transport.rank,
        tuple(lowering.body(phase.body(transport.rank)) for phase in program.phases),
        tuple(lowering.exits(phase.body(transport.rank)) for phase in program.phases),
        lowering.tensors,
    )


class _Lowering:
    def __init__(
        self,
        program: Program,
        transport: Transport,
        workspace: Workspace | None,
        tensors: Mapping[str, Any],
        gemm: GemmProvider,
        streams: Mapping[str, Any] | None,
    ) -> None:
        self.program, self.transport, self.workspace = program, transport, workspace
        self.gemm = gemm
        self.streams = streams or {}
        self.device: Any = getattr(transport, "device", None)
        self.rank, self.world_size = transport.rank, transport.world_size
        self.tensors: dict[str, Any] = {}
        if program.world_size != self.world_size:
            raise InvalidInput(
                f"The Program is for {program.world_size} ranks, there are {self.world_size}."
            )
        for buffer in program.buffers:
            if buffer.kind == "local":
                self.tensors[buffer.name] = self._local(buffer, tensors)

    def body(self, body: Body) -> tuple[LoweredOperation, ...]:
        entries = set(self.program.entries(body))
        caller = self.program.caller_stream
        first = next((one.id for one in body.operations if one.stream == caller), None)
        return tuple(
            LoweredOperation(
                operation,
                tuple(self._launch(operation, slot) for slot in range(self.program.slot_period)),
                self._moved_bytes(operation),
                self._flops(operation),
                self._peer(operation),
                tuple(
                    body.index[id] for id in operation.after if body[id].stream != operation.stream
                ),
                operation.id in entries or operation.id == first,
            )
            for operation in body.operations
        )

    def exits(self, body: Body) -> tuple[int, ...]:
        caller = [one.id for one in body.operations if one.stream == self.program.caller_stream]
        return tuple(body.index[id] for id in (*self.program.exits(body), *caller[-1:]))

    # ---- memory ------------------------------------------------------------------------------

    def _local(self, buffer: Buffer, tensors: Mapping[str, Any]) -> Any:
        import torch

        from stretto.runtime.tensors import torch_dtype

        rows = buffer.rows.stored(self.world_size)
        columns = buffer.columns.stored(self.world_size)
        dtype = torch_dtype(buffer.dtype)
        if not buffer.of_caller:
            make = torch.zeros if buffer.initial == "zero" else torch.empty
            return make((buffer.slots * rows, columns), dtype=dtype, device=self.device)
        tensor = tensors.get(buffer.name)
        if tensor is None:
            raise InvalidInput(f"The Program needs a tensor for its {buffer.role} {buffer.name!r}.")
        valid = rows
        if buffer.rows.layout == "shard":
            valid = buffer.rows.valid(self.rank, self.world_size)
        if tensor.dim() != 2 or tensor.shape[1] != columns or tensor.shape[0] not in (rows, valid):
            raise InvalidInput(
                f"{buffer.role} {buffer.name!r} of rank {self.rank} must have shape "
                f"[{valid}, {columns}], not {list(tensor.shape)}."
            )
        if tensor.dtype != dtype:
            raise InvalidInput(
                f"{buffer.role} {buffer.name!r} must be {dtype}, not {tensor.dtype}."
            )
        if not tensor.is_contiguous():
            raise InvalidInput(f"{buffer.role} {buffer.name!r} must be contiguous.")
        return tensor

    def _base(self, buffer: Buffer, *, owner: int, slot: int) -> int:
        if buffer.kind == "symmetric":
            if self.workspace is None:
                raise InvalidInput(
                    f"Buffer {buffer.name!r} is symmetric but there is no workspace."
                )
            return self.workspace.address(buffer.name, rank=owner, slot=slot)
        address: int = self.tensors[buffer.name].data_ptr()
        return address + slot * buffer.slot_bytes(self.world_size)

    def _memory(self, view: View, slot: int) -> Memory:
        buffer = self.program.buffer[view.buffer]
        rectangle = view.resolve(buffer, rank=self.rank, world_size=self.world_size, call=slot)
        base = self._base(buffer, owner=rectangle.owner, slot=rectangle.slot)
        return memory_of(base, buffer, rectangle, self.world_size)

    def _tensor(self, view: View, slot: int) -> Any:
        buffer = self.program.buffer[view.buffer]
        rectangle = view.resolve(buffer, rank=self.rank, world_size=self.world_size, call=slot)
        rows = buffer.rows.stored(self.world_size)
        columns = buffer.columns.stored(self.world_size)
        if buffer.kind == "symmetric":
            whole = tensor_at(
                self._base(buffer, owner=rectangle.owner, slot=rectangle.slot),
                rows,
                columns,
                buffer.dtype,
                self.device,
            )
        else:
            whole = self.tensors[buffer.name]
            if not buffer.of_caller:
                whole = whole.narrow(0, rectangle.slot * rows, rows)
        return whole.narrow(0, rectangle.row, rectangle.rows).narrow(
            1, rectangle.column, rectangle.columns
        )

    # ---- launches ----------------------------------------------------------------------------

    def _launch(self, operation: Operation, slot: int) -> Launch:
        if isinstance(operation, Gemm):
            accumulate = None
            if operation.accumulate is not None:
                accumulate = self._tensor(operation.accumulate, slot)
            return _without_call(
                self.gemm.prepare(
                    self._tensor(operation.a, slot),
                    self._tensor(operation.b, slot),
                    self._tensor(operation.out, slot),
                    accumulate,
                )
            )
        if isinstance(operation, Put):
            return self._put(operation, slot)
        if isinstance(operation, (Signal, Wait)):
            return self._flags(operation, slot)
        if isinstance(operation, Collective):
            return self._collective(operation, slot)
        if isinstance(operation, Copy):
            source = self._tensor(operation.source, slot)
            return _without_call(partial(self._tensor(operation.destination, slot).copy_, source))
        if isinstance(operation, Fill):
            destination = self._tensor(operation.destination, slot)
            return _without_call(partial(destination.fill_, operation.number))
        if isinstance(operation, Reduce):
            inputs = [self._tensor(view, slot) for view in operation.inputs]
            return _without_call(partial(_reduce, inputs, self._tensor(operation.out, slot)))
        if isinstance(operation, RowOp) and operation.function == "add":
            inputs = [self._tensor(view, slot) for view in operation.inputs]
            return _without_call(partial(_reduce, inputs, self._tensor(operation.outputs[0], slot)))
        raise Unsupported(
            f"operation {operation.id}: {operation.kind} "
            f"{getattr(operation, 'function', '')!r} cannot be executed for real yet; "
            "it can be simulated."
        )

    def _put(self, operation: Put, slot: int) -> Launch:
        label = Label(operation.stream, operation.id)
        put = self.transport.put(
            self._memory(operation.source, slot),
            self._memory(operation.destination, slot),
            stream=self._stream(operation),
            label=label,
        )
        if operation.signal is None or self.workspace is None:
            return put
        (sync,) = operation.signals()
        flag = self.program.flag[sync.word.flag]
        word = sync.word.resolve(flag, rank=self.rank, world_size=self.world_size, call=slot)
        signal = self.transport.signal(
            self.workspace, [word], sync.value, stream=self._stream(operation), label=label
        )

        def put_then_signal(call: int) -> Sequence[int]:
            put(call)
            return signal(call)

        return put_then_signal

    def _flags(self, operation: Signal | Wait, slot: int) -> Launch:
        if self.workspace is None:
            raise InvalidInput(f"operation {operation.id} needs flags, but there is no workspace.")
        words = [
            word.resolve(
                self.program.flag[word.flag],
                rank=self.rank,
                world_size=self.world_size,
                call=slot,
            )
            for word in operation.words
        ]
        verb = self.transport.signal if isinstance(operation, Signal) else self.transport.wait
        return verb(
            self.workspace,
            words,
            operation.value,
            stream=self._stream(operation),
            label=Label(operation.stream, operation.id),
        )

    def _collective(self, operation: Collective, slot: int) -> Launch:
        if self.workspace is None:
            raise InvalidInput(f"operation {operation.id} needs a workspace.")
        source = self.program.buffer[operation.source.buffer]
        destination = self.program.buffer[operation.destination.buffer]
        blocks = source if operation.collective == "all_gather" else destination
        return self.transport.collective(
            self.workspace,
            operation.collective,
            self._memory(operation.source, slot),
            self._memory(operation.destination, slot),
            dtype=source.dtype,
            blocks=[blocks.rows.valid(rank, self.world_size) for rank in range(self.world_size)],
            stream=self._stream(operation),
            label=Label(operation.stream, operation.id),
        )

    def _stream(self, operation: Operation) -> Any:
        return self.streams.get(operation.stream, operation.stream)

    # ---- for the record ----------------------------------------------------------------------

    def _moved_bytes(self, operation: Operation) -> int:
        if isinstance(operation, Put):
            return self._memory(operation.source, 0).total_bytes
        if isinstance(operation, Collective):
            gathers = operation.collective == "all_gather"
            full = operation.destination if gathers else operation.source
            return self._memory(full, 0).total_bytes
        return 0

    def _flops(self, operation: Operation) -> float:
        if not isinstance(operation, Gemm):
            return 0.0
        a, out = self._tensor(operation.a, 0), self._tensor(operation.out, 0)
        return 2.0 * a.shape[0] * a.shape[1] * out.shape[1]

    def _peer(self, operation: Operation) -> int | None:
        if isinstance(operation, Put):
            return operation.destination.on.of(self.rank, self.world_size)
        return None


def _without_call(function: Callable[[], Any]) -> Launch:
    def launch(call: int) -> Sequence[int]:
        function()
        return ()

    return launch


def _reduce(inputs: Sequence[Any], out: Any) -> None:
    import torch

    wide = torch.float64 if out.dtype == torch.float64 else torch.float32
    total = inputs[0].to(wide)
    for one in inputs[1:]:
        total = total + one.to(wide)
    out.copy_(total)
