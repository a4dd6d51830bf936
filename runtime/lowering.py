"""Lowering: a Program becomes a flat list of launches with every address resolved.

One list for each slot residue (`Program.slot_period`), since addresses of the workspace differ by
slot and by nothing else.  A launch takes the workspace's use count; everything else is bound
already (`stretto.runtime.executable` says when the caller's tensors are).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from stretto.runtime.executable import Executable, LoweredOperation, TensorBinder
from stretto.runtime.gemm import GemmProvider
from stretto.runtime.row_operations import TORCH_FORMS, sum_into
from stretto.runtime.tensors import memory_of, tensor_at, torch_dtype
from stretto.schedules.language import (
    DTYPE_BYTES,
    SLOT,
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
    options_of,
    slot_places,
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
        executable.bind(slot, given)
    return executable


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
        self.places = slot_places(program)
        self.scratch = {
            buffer.name: self._scratch(buffer)
            for buffer in program.buffers
            if buffer.kind == "local" and not buffer.of_caller
        }

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

    def _rectangle(self, view: View, slot: int) -> Rectangle:
        buffer = self.program.buffer[view.buffer]
        return view.resolve(buffer, rank=self.rank, world_size=self.world_size, call=slot)

    def _memory(self, view: View, slot: int) -> Callable[[], Memory]:
        """Return what gives a view's memory: the caller's may be another in every call."""
        buffer, rectangle = self.program.buffer[view.buffer], self._rectangle(view, slot)
        if not buffer.of_caller:
            base = self._base(buffer, owner=rectangle.owner, slot=rectangle.slot)
            fixed = memory_of(base, buffer, rectangle, self.world_size)
            return lambda: fixed
        within, tensors = memory_of(0, buffer, rectangle, self.world_size), self.binder.tensors
        name = buffer.name
        return lambda: within._replace(address=within.address + tensors[name].data_ptr())

    def _base(self, buffer: Buffer, *, owner: int, slot: int) -> int:
        """Return where a slot of a buffer begins that is not the caller's."""
        if buffer.kind == "symmetric":
            if self.workspace is None:
                raise InvalidInput(
                    f"Buffer {buffer.name!r} is symmetric but there is no workspace."
                )
            if buffer.name in self.places:
                return (
                    self.workspace.address(SLOT, rank=owner, slot=slot) + self.places[buffer.name]
                )
            return self.workspace.address(buffer.name, rank=owner, slot=slot)
        address: int = self.scratch[buffer.name].data_ptr()
        return address + slot * buffer.slot_bytes(self.world_size)

    def _tensor(self, view: View, slot: int) -> Callable[[], Any]:
        """Return what gives a view's rectangle as a tensor."""
        buffer, rectangle = self.program.buffer[view.buffer], self._rectangle(view, slot)
        if not buffer.of_caller:
            fixed = tensor_at(self._memory(view, slot)(), buffer.dtype, self.device)
            return lambda: fixed
        name, tensors = buffer.name, self.binder.tensors
        row, rows, column, columns = rectangle[3:]
        if columns == buffer.columns.stored(self.world_size):
            return lambda: tensors[name].narrow(0, row, rows)
        return lambda: tensors[name].narrow(0, row, rows).narrow(1, column, columns)

    # ---- launches ----------------------------------------------------------------------------

    def _launch(self, operation: Operation, slot: int) -> Launch:
        if isinstance(operation, (Signal, Wait)):
            return self._flags(operation, slot)
        launch = self._bound(operation, slot, self._preparation(operation, slot))
        if isinstance(operation, Put) and operation.signal is not None and self.workspace:
            return self._with_signal(operation, slot, launch)
        return launch

    def _bound(self, operation: Operation, slot: int, prepare: Callable[[], Launch]) -> Launch:
        """Prepare now, or whenever the caller's tensors are known if it touches them."""
        views = (*operation.reads(), *operation.writes())
        if any(self.program.buffer[view.buffer].of_caller for view in views):
            return self.binder.late(slot, prepare)
        return prepare()

    def _preparation(self, operation: Operation, slot: int) -> Callable[[], Launch]:
        """Return what makes the launch, with all that does not change worked out already."""
        if isinstance(operation, Put):
            return self._put(operation, slot)
        if isinstance(operation, Gemm):
            return self._gemm(operation, slot)
        if isinstance(operation, Collective):
            return self._collective(operation, slot)
        if isinstance(operation, Copy):
            source = self._tensor(operation.source, slot)
            target = self._tensor(operation.destination, slot)
            return lambda: _without_call(partial(target().copy_, source()))
        if isinstance(operation, Fill):
            target, number = self._tensor(operation.destination, slot), operation.number
            return lambda: _without_call(partial(target().fill_, number))
        if isinstance(operation, Reduce):
            terms = self._tensors(operation.inputs, slot)
            target = self._tensor(operation.out, slot)
            return lambda: _without_call(partial(sum_into, terms(), target()))
        if isinstance(operation, RowOp) and operation.function in TORCH_FORMS:
            return self._row_operation(operation, slot)
        raise Unsupported(
            f"operation {operation.id}: {operation.kind} "
            f"{getattr(operation, 'function', '')!r} cannot be executed for real yet; "
            "it can be simulated."
        )

    def _tensors(self, views: Sequence[View], slot: int) -> Callable[[], list[Any]]:
        tensors = [self._tensor(view, slot) for view in views]
        return lambda: [tensor() for tensor in tensors]

    def _row_operation(self, operation: RowOp, slot: int) -> Callable[[], Launch]:
        operands = self._tensors(operation.reads(), slot)
        outputs = self._tensors(operation.outputs, slot)
        form = partial(TORCH_FORMS[operation.function], **options_of(operation))
        return lambda: _without_call(partial(form, outputs(), *operands()))

    def _gemm(self, operation: Gemm, slot: int) -> Callable[[], Launch]:
        a, b = self._tensor(operation.a, slot), self._tensor(operation.b, slot)
        out, provider = self._tensor(operation.out, slot), self.gemm
        if operation.accumulate is None:
            return lambda: _without_call(provider.prepare(a(), b(), out(), None))
        addend = self._tensor(operation.accumulate, slot)
        return lambda: _without_call(provider.prepare(a(), b(), out(), addend()))

    def _put(self, operation: Put, slot: int) -> Callable[[], Launch]:
        source = self._memory(operation.source, slot)
        target = self._memory(operation.destination, slot)
        label, stream = Label(operation.stream, operation.id), self._stream(operation)
        put = self.transport.put
        return lambda: put(source(), target(), stream=stream, label=label)

    def _with_signal(self, operation: Put, slot: int, put: Launch) -> Launch:
        assert self.workspace is not None
        (sync,) = operation.signals()
        flag = self.program.flag[sync.word.flag]
        word = sync.word.resolve(flag, rank=self.rank, world_size=self.world_size, call=slot)
        signal = self.transport.signal(
            self.workspace,
            [word],
            sync.value,
            stream=self._stream(operation),
            label=Label(operation.stream, operation.id),
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

    def _collective(self, operation: Collective, slot: int) -> Callable[[], Launch]:
        if self.workspace is None:
            raise InvalidInput(f"operation {operation.id} needs a workspace.")
        source = self.program.buffer[operation.source.buffer]
        destination = self.program.buffer[operation.destination.buffer]
        rows = (source if operation.collective == "all_gather" else destination).rows
        make = partial(
            self.transport.collective,
            self.workspace,
            operation.collective,
            dtype=source.dtype,
            blocks=[rows.valid(rank, self.world_size) for rank in range(self.world_size)],
            stream=self._stream(operation),
            label=Label(operation.stream, operation.id),
        )
        taken = self._memory(operation.source, slot)
        given = self._memory(operation.destination, slot)
        return lambda: make(taken(), given())

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
