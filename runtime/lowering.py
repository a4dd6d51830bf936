"""Lowering: a Program becomes a flat list of launches with every address resolved.

One list for each slot residue (`Program.slot_period`), since addresses of the workspace differ by
slot and by nothing else.  A launch takes the workspace's use count; everything else is bound
already (`stretto.runtime.executable` says when the caller's tensors are).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from stretto.runtime.executable import Executable, LoweredOperation, TensorBinder
from stretto.runtime.gemm import GemmProvider
from stretto.runtime.tensors import memory_of, tensor_at, torch_dtype
from stretto.schedules.language import (
    DTYPE_BYTES,
    Body,
    Buffer,
    Collective,
    Copy,
    Fill,
    Gemm,
    InvalidInput,
    Operation,
    Program,
    Put,
    Rectangle,
    Reduce,
    RowOp,
    Signal,
    Unsupported,
    View,
    Wait,
)
from stretto.transports.interface import Label, Launch, Memory, Transport, Workspace

__all__ = ["lower"]


def lower(
    program: Program,
    *,
    transport: Transport,
    workspace: Workspace | None,
    tensors: Mapping[str, Any] | None,
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
        this rank (a short shard's tensor may have just its valid rows).  `Executable.bind` puts
        others in their place; None leaves all to it.
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
    lowering = _Lowering(program, transport, workspace, gemm, streams)
    phases = tuple(lowering.body(phase.body(transport.rank)) for phase in program.phases)
    exits = tuple(lowering.exits(phase.body(transport.rank)) for phase in program.phases)
    keep = tuple(lowering.scratch.values())
    executable = Executable(program, transport.rank, phases, exits, lowering.binder, keep)
    if tensors is None:
        return executable
    given = {
        buffer.name: _checked(buffer, tensors.get(buffer.name), transport)
        for buffer in program.buffers
        if buffer.of_caller
    }
    for slot in range(program.slot_period):
        executable.bind(slot, {name: tensor.data_ptr() for name, tensor in given.items()})
    return replace(executable, keep=(*keep, *given.values()))


def _checked(buffer: Buffer, tensor: Any, transport: Transport) -> Any:
    """Return a caller's tensor, or say what is wrong with it."""
    world_size = transport.world_size
    rows, columns = buffer.rows.stored(world_size), buffer.columns.stored(world_size)
    if tensor is None:
        raise InvalidInput(f"The Program needs a tensor for its {buffer.role} {buffer.name!r}.")
    valid = rows
    if buffer.rows.layout == "shard":
        valid = buffer.rows.valid(transport.rank, world_size)
    if tensor.dim() != 2 or tensor.shape[1] != columns or tensor.shape[0] not in (rows, valid):
        raise InvalidInput(
            f"{buffer.role} {buffer.name!r} of rank {transport.rank} must have shape "
            f"[{valid}, {columns}], not {list(tensor.shape)}."
        )
    if tensor.dtype != torch_dtype(buffer.dtype):
        raise InvalidInput(
            f"{buffer.role} {buffer.name!r} must be {torch_dtype(buffer.dtype)}, "
            f"not {tensor.dtype}."
        )
    if not tensor.is_contiguous():
        raise InvalidInput(f"{buffer.role} {buffer.name!r} must be contiguous.")
    return tensor


class _Lowering:
    def __init__(
        self,
        program: Program,
        transport: Transport,
        workspace: Workspace | None,
        gemm: GemmProvider,
        streams: Mapping[str, Any] | None,
    ) -> None:
        self.program, self.transport, self.workspace = program, transport, workspace
        self.gemm = gemm
        self.streams = streams or {}
        self.device = transport.device
        self.rank, self.world_size = transport.rank, transport.world_size
        if program.world_size != self.world_size:
            raise InvalidInput(
                f"The Program is for {program.world_size} ranks, there are {self.world_size}."
            )
        self.binder = TensorBinder()
        self.scratch = {
            buffer.name: self._scratch(buffer)
            for buffer in program.buffers
            if buffer.kind == "local" and not buffer.of_caller
        }
        self._rectangles: dict[tuple[View, int], Rectangle] = {}

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

    def _scratch(self, buffer: Buffer) -> Any:
        import torch

        make = torch.zeros if buffer.initial == "zero" else torch.empty
        rows = buffer.slots * buffer.rows.stored(self.world_size)
        shape = (rows, buffer.columns.stored(self.world_size))
        return make(shape, dtype=torch_dtype(buffer.dtype), device=self.device)

    def _base(self, buffer: Buffer, *, owner: int, slot: int) -> int:
        if buffer.kind == "symmetric":
            if self.workspace is None:
                raise InvalidInput(
                    f"Buffer {buffer.name!r} is symmetric but there is no workspace."
                )
            return self.workspace.address(buffer.name, rank=owner, slot=slot)
        if buffer.of_caller:
            return self.binder.addresses[buffer.name]
        address: int = self.scratch[buffer.name].data_ptr()
        return address + slot * buffer.slot_bytes(self.world_size)

    def _rectangle(self, view: View, slot: int) -> Rectangle:
        found = self._rectangles.get((view, slot))
        if found is None:
            buffer = self.program.buffer[view.buffer]
            found = view.resolve(buffer, rank=self.rank, world_size=self.world_size, call=slot)
            self._rectangles[view, slot] = found
        return found

    def _memory(self, view: View, slot: int) -> Memory:
        buffer, rectangle = self.program.buffer[view.buffer], self._rectangle(view, slot)
        base = self._base(buffer, owner=rectangle.owner, slot=rectangle.slot)
        return memory_of(base, buffer, rectangle, self.world_size)

    def _tensor(self, view: View, slot: int) -> Any:
        """Return a view's rectangle as a tensor, which keeps no memory alive."""
        dtype = self.program.buffer[view.buffer].dtype
        return tensor_at(self._memory(view, slot), dtype, self.device)

    # ---- launches ----------------------------------------------------------------------------

    def _launch(self, operation: Operation, slot: int) -> Launch:
        if isinstance(operation, Put):
            return self._put(operation, slot)
        if isinstance(operation, (Signal, Wait)):
            return self._flags(operation, slot)
        prepare = partial(self._prepared, operation, slot)
        if self._touches_caller(operation):
            return self.binder.late(slot, prepare)
        return prepare()

    def _touches_caller(self, operation: Operation) -> bool:
        views = (*operation.reads(), *operation.writes())
        return any(self.program.buffer[view.buffer].of_caller for view in views)

    def _prepared(self, operation: Operation, slot: int) -> Launch:
        if isinstance(operation, Gemm):
            return self._gemm(operation, slot)
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

    def _gemm(self, operation: Gemm, slot: int) -> Launch:
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

    def _put(self, operation: Put, slot: int) -> Launch:
        label = Label(operation.stream, operation.id)

        def prepare() -> Launch:
            return self.transport.put(
                self._memory(operation.source, slot),
                self._memory(operation.destination, slot),
                stream=self._stream(operation),
                label=label,
            )

        late = self._touches_caller(operation)
        put = self.binder.late(slot, prepare) if late else prepare()
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
            return self._bytes(operation.source)
        if isinstance(operation, Collective):
            gathers = operation.collective == "all_gather"
            return self._bytes(operation.destination if gathers else operation.source)
        return 0

    def _bytes(self, view: View) -> int:
        rectangle = self._rectangle(view, 0)
        element = DTYPE_BYTES[self.program.buffer[view.buffer].dtype]
        return rectangle.rows * rectangle.columns * element

    def _flops(self, operation: Operation) -> float:
        if not isinstance(operation, Gemm):
            return 0.0
        a, out = self._rectangle(operation.a, 0), self._rectangle(operation.out, 0)
        return 2.0 * a.rows * a.columns * out.columns

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
