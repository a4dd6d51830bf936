"""What schedules share that take turns on a workspace, and what is one schedule's own.

They share symmetric buffers that are given back, and the flags named after those: the `contract`
says how.  Other symmetric buffers and flags must be used by one schedule alone (`unshared`), as its
local buffers are.  What it does with them has to be safe, and come to its end, however many calls
of others lie between two of its executions.  All that it knows of those is that they gave back what
it waits for (`granted`), after it had given back the same slot itself.
"""

from __future__ import annotations

from stretto.schedules.language import Buffer, Program
from stretto.schedules.verifier.world import World, signed

__all__ = ["given_back", "granted", "own_storages", "owns_flags", "owns_memory", "unshared"]


def given_back(program: Program) -> set[str]:
    """Return the names of the buffers that are shared."""
    return {
        buffer.name
        for buffer in program.buffers
        if _is_symmetric(buffer)
        and buffer.reuse == "release"
        and f"{buffer.name}.released" in program.flag
    }


def unshared(program: Program) -> tuple[str, ...]:
    """Return the symmetric buffers and the flags that no other schedule may use."""
    shared = given_back(program)
    buffers = [one.name for one in program.buffers if _is_symmetric(one) and one.name not in shared]
    flags = [one.name for one in program.flags if one.name.rpartition(".")[0] not in shared]
    return (*buffers, *flags)


def owns_memory(program: Program) -> bool:
    """Whether it has buffers of its own that live on from call to call."""
    return bool(_own_buffers(program))


def owns_flags(program: Program) -> bool:
    """Whether it has flags of its own: what one execution leaves in them, the next one finds."""
    names = {one.name for one in program.flags}
    return bool(names.intersection(unshared(program)))


def own_storages(world: World) -> set[int]:
    """Return the storages of such buffers."""
    own = [_own_buffers(program) for program in world.programs]
    found = set()
    for access in world.accesses:
        (_, name), _, _ = world.storages[access.storage]
        if name in own[world.turns[world.sites[access.site].turn].program]:
            found.add(access.storage)
    return found


def granted(world: World) -> World:
    """Let others have given back what they used before an execution; return the same World.

    The release that a wait expects of a call before the execution was that of another schedule.
    What it says of this one is that the same slot was given back before.
    """
    first_call: dict[int, int] = {}
    for turn in world.turns:
        first_call.setdefault(turn.execution, signed(turn.call))
    signalled: dict[int, list[tuple[int, int]]] = {}
    for event, (word, value) in world.fired.items():
        signalled.setdefault(word, []).append((world.turn_of(event).execution, value))
    released = {f"{name}.released" for program in world.programs for name in given_back(program)}
    for event, awaited in world.awaited.items():
        execution = world.turn_of(event).execution
        least = []
        for word, expected in awaited:
            if world.flags.word(word).flag in released and expected <= first_call[execution]:
                before = [value for number, value in signalled.get(word, ()) if number < execution]
                expected = max([world.flags.initial[word], *before])
            least.append((word, expected))
        world.awaited[event] = tuple(least)
    return world


def _is_symmetric(buffer: Buffer) -> bool:
    return buffer.kind == "symmetric" and buffer.role == "workspace"


def _own_buffers(program: Program) -> set[str]:
    """Return the workspace buffers that are not shared.

    The caller's are not among them: they are ordered by the caller's stream in every call.
    """
    shared = given_back(program)
    return {one.name for one in program.buffers if one.role == "workspace"} - shared
