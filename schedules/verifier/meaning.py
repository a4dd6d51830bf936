"""What numbers are where: a run with symbols in place of numbers.

If nothing races, every run gives the same numbers, so one run tells what all compute.  Memory holds
*patches*: rectangles whose element (i, j) is element (i + down, j + right) of one symbolic matrix.
A copy moves patches, a GEMM makes a new symbol out of those of its operands::

    x of execution 0        ("input", "x", 0)                 elements by global row
    a[m, k] @ b[n, k].T     a sum of ("dot", a, b, k0, k)     rows those of a, columns rows of b
    a + b                   a sum of both, terms in one order; dots over adjoining k are joined
    f(a, b)                 ("function", f, ...) of the rows of a and b, tables and options

A sum is one symbol whoever makes it: a reduce, a collective, the row operations that add, a GEMM
that accumulates, a kernel that adds what it emits.

Two outputs are equal if their symbols are.  What a Program says it computes (`Program.computes`)
is worked out in the same symbols, and every output held against it.  Bytes that nobody wrote are
found on the way: there is no patch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from stretto.schedules.language import (
    Collective,
    Copy,
    Fill,
    FusedGemm,
    Gemm,
    Opaque,
    Program,
    Put,
    Reduce,
    RowOp,
    options_of,
)
from stretto.schedules.verifier.calls import Alike
from stretto.schedules.verifier.formulas import FORMULAS
from stretto.schedules.verifier.order import Order
from stretto.schedules.verifier.patches import (
    Block,
    Corners,
    Memory,
    added,
    clipped,
    joined,
    outside,
    product,
    runs,
    stacked,
)
from stretto.schedules.verifier.report import Reporter
from stretto.schedules.verifier.symbols import ONCE, Symbols, Value
from stretto.schedules.verifier.world import BEGIN, Access, Site, Turn

__all__ = ["find_wrong_numbers"]


def find_wrong_numbers(
    order: Order, report: Reporter, raced: set[int], alike: Sequence[Alike]
) -> bool:
    """Report reads of bytes that nobody wrote, and outputs that are not what they should be.

    Return whether all reads are alike where they are held against each other; always if no Program
    says what it computes.

    Parameters
    ----------
    order, report
        As for the others.
    raced
        Sites that take part in a race: what they read is open anyway.
    alike
        Turns whose reads are held against each other.
    """
    meaning = _Meaning(order, report, raced)
    meaning.run()
    known = any(program.computes in FORMULAS for program in order.world.programs)
    return not known or all(meaning.are_alike(*turns) for turns in alike)


class _Meaning:
    def __init__(self, order: Order, report: Reporter, raced: set[int]) -> None:
        self.order, self.report, self.world, self.raced = order, report, order.world, raced
        self.symbols = Symbols()
        self.memory = Memory(self.symbols)
        self.at: dict[int, list[Access]] = {}
        # By turn: what each of its reads found.
        self.found: list[dict[tuple[object, ...], list[tuple[Corners, Value]]]] = [
            {} for _ in order.world.turns
        ]
        for access in self.world.accesses:
            self.at.setdefault(access.start, []).append(access)

    def run(self) -> None:
        """Follow the run that was played."""
        self._zero()
        done: set[int] = set()
        for event in self.order.run.sequence:
            meeting = self.world.meeting_of.get(event)
            if meeting is not None:
                if meeting not in done:
                    done.add(meeting)
                    self._collective(meeting)
            elif event in self.at:
                self._perform(event, self.at[event])

    def are_alike(self, turn: int, later: int, executions: int) -> bool:
        """Whether all reads of one turn are like those of a later one."""
        reads, others = self.found[turn], self.found[later]
        return reads.keys() == others.keys() and all(
            others[read]
            == [(corners, self.symbols.later(value, executions)) for corners, value in patches]
            for read, patches in reads.items()
        )

    def _zero(self) -> None:
        """Fill what is zero before the first call."""
        seen: set[int] = set()
        for access in self.world.accesses:
            program = self.world.program_of(access.site)
            buffer, size = program.buffer[access.buffer], program.world_size
            if buffer.initial == "zero" and access.storage not in seen:
                seen.add(access.storage)
                whole = (0, buffer.rows.stored(size), 0, buffer.columns.stored(size))
                self.memory.zero(access, whole)

    # ---- one event ---------------------------------------------------------------------------

    def _perform(self, event: int, accesses: Sequence[Access]) -> None:
        site = self.world.sites[self.world.site[event]]
        if isinstance(site.operation, Collective):
            return  # done when all have come
        if site.operation is None:
            self._caller(site.name == BEGIN, accesses)
            return
        reads = [access for access in accesses if access.mode == "read"]
        writes = [access for access in accesses if access.mode != "read"]
        blocks = [self._read(access) for access in reads]
        operation = site.operation
        if not writes:
            return  # of an empty shard
        if isinstance(operation, (Put, Copy)) or (
            isinstance(operation, FusedGemm) and len(reads) == 1
        ):
            (write,) = writes
            (block,) = blocks
            if write.mode == "add":
                block = added([self._held(write), block], self.symbols)
            self.memory.set(write, block)
        elif isinstance(operation, (Gemm, FusedGemm)):
            if len(blocks) < 2:  # without columns a and b are not read, and their product is zero
                addends = [*blocks, _filled(writes[0], self.symbols.zero)]
            else:
                a, b, *more = blocks
                addends = [product(a, b, self.symbols), *more]
            self.memory.set(writes[0], added(addends, self.symbols))
        elif isinstance(operation, Reduce):
            self.memory.set(writes[0], added(blocks, self.symbols))
        elif isinstance(operation, Fill):
            for write in writes:
                self.memory.set(write, _filled(write, self.symbols.constant(operation.number)))
        elif isinstance(operation, RowOp):
            self._row_operation(operation, site, blocks, writes)
        elif isinstance(operation, Opaque):
            arguments = tuple(_argument(block) for block in blocks)
            values = [value for block in blocks for _, value in block.patches]
            for output, write in enumerate(writes):
                value = self.symbols.function(operation.function, output, arguments, values)
                self.memory.set(write, _filled(write, value))

    def _caller(self, begins: bool, accesses: Sequence[Access]) -> None:
        for access in accesses:
            name, rank = access.buffer, self.world.storages[access.storage][1]
            turn = self.world.turns[self.world.sites[access.site].turn]
            program = self.world.programs[turn.program]
            buffer = program.buffer[name]
            if access.mode == "read":
                self._check_output(program, access, rank)
            elif begins and buffer.initial == "caller":
                value = self._input(turn, name, rank)
                if buffer.rows.layout == "shard":
                    value = value.moved(rank * buffer.rows.block(program.world_size), 0)
                self.memory.set(access, _filled(access, value))
            elif buffer.initial == "undefined" or not begins:
                self.memory.clear(access)

    def _collective(self, meeting: int) -> None:
        """Give every rank what a collective leaves in its destination."""
        operation = None
        sources: list[Block] = []
        writes: list[Access] = []
        for event in self.world.meetings[meeting]:
            operation = self.world.sites[self.world.site[event]].operation
            rank = self.world.sites[self.world.site[event]].rank
            for access in self.at.get(event, ()):
                if access.mode == "read":
                    sources.append(self._read(access))
                elif self.world.storages[access.storage][1] == rank:
                    writes.append(access)
        assert isinstance(operation, Collective)
        if not sources:
            return
        if operation.collective == "all_gather":
            whole = stacked(sources, self.symbols)
        else:
            if len({block[:2] for block in sources}) != 1:
                return  # reported as a mismatch
            whole = added(sources, self.symbols)
        row = 0
        for write in writes:
            rows, columns = write.row_stop - write.row, write.column_stop - write.column
            scattered = operation.collective == "reduce_scatter"
            part = clipped(whole, row if scattered else 0, rows, columns, self.symbols)
            self.memory.set(write, part)
            row += rows

    def _row_operation(
        self, operation: RowOp, site: Site, blocks: Sequence[Block], writes: Sequence[Access]
    ) -> None:
        """Apply a row operation: known sums as sums, all else as a function of each row."""
        program, turn = self.world.programs[self.world.turns[site.turn].program], site.turn
        tables = 0  # how many of the last blocks are tables; an empty one is not read
        for view in operation.tables:
            place = view.resolve(
                program.buffer[view.buffer],
                rank=site.rank,
                world_size=program.world_size,
                call=self.world.turns[turn].call,
            )
            tables += bool(place.rows and place.columns)
        first = len(blocks) - tables
        inputs, whole = blocks[:first], [_argument(block) for block in blocks[first:]]
        values = [value for block in blocks[first:] for _, value in block.patches]
        name, outputs = operation.function, list(writes)
        if name in ("add", "add_rms_norm"):
            total = added(inputs, self.symbols)
            self.memory.set(outputs.pop(0), total)
            inputs, name = [total], "rms_norm"
        if outputs:
            options = tuple(sorted(options_of(operation).items()))
            self._by_rows(name, inputs, outputs, (options, *whole), values)

    def _by_rows(
        self,
        function: str,
        blocks: Sequence[Block],
        writes: Sequence[Access],
        constant: tuple[object, ...],
        of_constant: Sequence[Value],
    ) -> None:
        """Apply a function that works on each row by itself.

        `constant` are arguments that are the same for all rows, `of_constant` the values in them.
        """
        pieces_of = [list(runs(block, self.symbols)) for block in blocks]
        cuts = sorted(
            {edge for run in pieces_of for (row, row_stop), _ in run for edge in (row, row_stop)}
        )
        for output, write in enumerate(writes):
            rows, columns = write.row_stop - write.row, write.column_stop - write.column
            patches = []
            for row, row_stop in pairwise(cuts) if pieces_of else [(0, rows)]:
                arguments: list[object] = [constant]
                values: list[Value] = list(of_constant)
                base: int | None = None
                for run in pieces_of:
                    for (first, stop), pieces in run:
                        if first <= row and row_stop <= stop:
                            for start, end, value in _side_joined(pieces):
                                seen = self.symbols.moved(value, row - first, 0)
                                values.append(seen)
                                if self.symbols.has_place(seen):
                                    base = seen.down if base is None else base
                                    seen = Value(seen.symbol, seen.down - base, seen.right + start)
                                arguments.append((start, end, seen))
                    arguments.append("next")
                value = self.symbols.function(function, output, tuple(arguments), values)
                placed = self.symbols.moved(value, (base or 0) - row, 0)
                patches.append(((row, row_stop, 0, columns), placed))
            self.memory.set(write, Block(rows, columns, patches))

    # ---- what is there -----------------------------------------------------------------------

    def _read(self, access: Access) -> Block:
        """Return what an operation finds, and note it."""
        block = self._held(access)
        self._note(access, block)
        return block

    def _held(self, access: Access) -> Block:
        """Return what is in a rectangle.

        What an add finds is not noted: it depends on which adds came before, which commute, and
        nobody sees it before it is read with all of them.
        """
        block = self.memory.get(access)
        area = sum((one[1] - one[0]) * (one[3] - one[2]) for one, _ in block.patches)
        if area == block.rows * block.columns:
            return block
        missing: list[Corners] = [(0, block.rows, 0, block.columns)]
        for corners, _ in block.patches:
            missing = [rest for one in missing for rest in outside(one, corners)]
        if access.site not in self.raced:
            self._report_unwritten(access, missing[0])
        unknown = self.symbols.unknown((access.site, access.storage))
        return Block(
            block.rows, block.columns, [*block.patches, *((one, unknown) for one in missing)]
        )

    def _note(self, access: Access, block: Block) -> None:
        """Note what an operation finds, under what is the same in every call."""
        site = self.world.sites[access.site]
        if site.operation is not None:
            name, owner = access.buffer, self.world.storages[access.storage][1]
            place = access.start - self.world.first[access.site]
            read = (site.rank, site.position, place, name, owner, access.row, access.column)
            self.found[site.turn][read] = sorted(block.patches)

    def _report_unwritten(self, access: Access, missing: Corners) -> None:
        report = self.report
        hole = _part(access, missing)
        text = report.subject(access.site)
        if self.world.sites[access.site].operation is None:
            text += " who"
        report.add(
            "unwritten",
            f"{text} reads {report.rectangle(hole)}, which nobody has written.",
            missing="a write of these bytes, ordered before the read",
            places=(report.touched(hole),),
            goals=(access.start,),
            open=(access.site,),
        )

    def _input(self, turn: Turn, name: str, rank: int) -> Value:
        """Return what the caller gave for an execution, or before the first one."""
        buffer = self.world.programs[turn.program].buffer[name]
        execution = turn.execution if buffer.reuse == "caller_stream" else ONCE
        whose = None if buffer.rows.layout == "shard" else rank
        return self.symbols.input(name, execution, whose)

    def _check_output(self, program: Program, access: Access, rank: int) -> None:
        block = self._read(access)
        if self.raced or any(self.symbols.is_unknown(value) for _, value in block.patches):
            return  # open, or reported as unwritten
        formula = FORMULAS.get(program.computes or "")
        name = access.buffer
        if formula is None or not {"x", "w", "y"} <= set(program.buffer):
            return
        turn = self.world.turns[self.world.sites[access.site].turn]
        expected = formula(
            program, self.symbols, lambda buffer, whose: self._input(turn, buffer, whose), rank
        )
        if expected.buffer != name:
            return
        for (row, row_stop, column, column_stop), value in joined(block.patches):
            if value != expected.value:
                rows = row_stop - row
                here = _part(access, (row, row_stop, column, column_stop))
                self.report.add(
                    "wrong_result",
                    f"After call {self.world.call_of(access.site)} of {program.name} there are "
                    f"{self.symbols.text(value.moved(row, 0), rows)} in "
                    f"{self.report.rectangle(here)}, and not "
                    f"{self.symbols.text(expected.value.moved(row, 0), rows)}, as "
                    f"{program.computes} says.",
                    places=(self.report.touched(here),),
                    goals=(access.start,),
                    open=(access.site,),
                )
                return


def _argument(block: Block) -> tuple[object, ...]:
    """Return a block as an argument of a function that reads it whole."""
    return (*block[:2], *sorted(block.patches))


def _side_joined(pieces: Sequence[tuple[int, int, Value]]) -> list[tuple[int, int, Value]]:
    """Return pieces of rows with those joined that go on with the same value to the right."""
    found: list[tuple[int, int, Value]] = []
    for start, end, value in pieces:
        if found and found[-1][1:] == (start, value):
            found[-1] = (found[-1][0], end, value)
        else:
            found.append((start, end, value))
    return found


def _filled(access: Access, value: Value) -> Block:
    """Return a block of one value in the size of the rectangle."""
    rows, columns = access.row_stop - access.row, access.column_stop - access.column
    return Block(rows, columns, [((0, rows, 0, columns), value)])


def _part(access: Access, corners: Corners) -> Access:
    """Return a part of a rectangle, given from its own corner."""
    row, row_stop, column, column_stop = corners
    return replace(
        access,
        row=access.row + row,
        row_stop=access.row + row_stop,
        column=access.column + column,
        column_stop=access.column + column_stop,
    )
