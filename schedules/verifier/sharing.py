"""What a Program has of its own on a workspace, and what it knows of the calls of others.

Slots, arrivals and releases are shared: the `contract` says how.  Other symmetric buffers, own
flags and local buffers are one Program's alone.  What it does with them has to be safe, and come to
its end, however many calls of others lie between two of its executions.  All that it knows of those
is that they gave back what it waits for (`granted`), after it had given back the same slot itself.
"""

from __future__ import annotations

from stretto.schedules.language import Program, in_slot, own_names
from stretto.schedules.verifier.world import World

__all__ = ["granted", "own_storages", "owns_flags", "owns_memory", "unshared"]


def unshared(program: Program) -> tuple[str, ...]:
    """Return the symmetric buffers and the flags that no other Program may use."""
    return own_names(program)


def owns_memory(program: Program) -> bool:
    """Whether it has buffers of its own that live on from call to call."""
    return bool(_own_buffers(program))


def owns_flags(program: Program) -> bool:
    """Whether it has flags of its own: what one execution leaves in them, the next one finds."""
    return any(flag.purpose == "own" for flag in program.flags)


def own_storages(world: World) -> set[int]:
    """Return the storages of such buffers."""
    own = [_own_buffers(program) for program in world.programs]
    return {
        access.storage
        for access in world.accesses
        if access.buffer in own[world.turns[world.sites[access.site].turn].program]
    }


def granted(world: World) -> World:
    """Let others have given back what they used before an execution; return the same World.

    The release that a wait expects of a call before the execution was that of another schedule.
    What it says of this one is that the same slot was given back before.
    """
    first_call: dict[int, int] = {}
    for turn in world.turns:
        first_call.setdefault(turn.execution, turn.call)
    signalled: dict[int, list[tuple[int, int]]] = {}
    for event, (word, value) in world.fired.items():
        signalled.setdefault(word, []).append((world.turn_of(event).execution, value))
    for event, awaited in world.awaited.items():
        execution = world.turn_of(event).execution
        least = []
        for word, expected in awaited:
            released = world.flags.purpose[word] == "release"
            if released and expected <= first_call[execution]:
                before = [value for number, value in signalled.get(word, ()) if number < execution]
                expected = max([world.flags.initial[word], *before])
            least.append((word, expected))
        world.awaited[event] = tuple(least)
    return world


def _own_buffers(program: Program) -> set[str]:
    """Return the workspace buffers that are not in the slot.

    The caller's are not among them: they are ordered by the caller's stream in every call.
    """
    return {one.name for one in program.buffers if one.role == "workspace" and not in_slot(one)}
