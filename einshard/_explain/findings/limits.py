"""Finds programs that do not fit, break `collectives=` or `memory=`, or cannot be checked."""

from __future__ import annotations

from collections.abc import Iterator

from ..._functions.promise import allowed_text, counts_text, exceeding
from ..._text import format_bytes
from ..local_devices import asked_texts
from ..report_rows import Finding
from .facts import Facts


def does_not_fit(facts: Facts) -> Iterator[Finding]:
    memory = facts.memory
    if memory is None or memory.capacity is None:
        return
    is_refused = facts.is_oversized
    if is_refused or memory.total > memory.capacity:
        # the CPU backend computes bf16 in f32, so memory differs from that on the chip
        as_compiled = ', as compiled for a CPU' if facts.platform == 'cpu' else ''
        text = (
            f'the program needs {format_bytes(memory.total)} of memory{as_compiled}, '
            f'but a device has only {format_bytes(memory.capacity)}'
            f'{", so it does not compile" if is_refused else ""}'
        )
        yield Finding('does not fit', text, bytes=memory.total)


def promise_broken(facts: Facts) -> Iterator[Finding]:
    """Reports a program that exceeds `collectives=` or `memory=`, so that a call raises."""
    limits, memory = facts.stages.limits, facts.memory
    if limits is None:
        return
    if limits.collectives is not None and (
        too_many := exceeding(limits.collectives, facts.collectives)
    ):
        allowed, found = allowed_text(limits.collectives), counts_text(too_many)
        text = f'collectives= allows {allowed}, but the program has {found}'
        sent = sum(collective.total_bytes for collective in too_many)
        yield Finding('promise broken', text, too_many[0].source, sent)
    if limits.memory is not None and memory is not None and memory.total > limits.memory:
        needs = format_bytes(memory.total)
        text = f'memory= allows {format_bytes(limits.memory)}, but the program needs {needs}'
        yield Finding('promise broken', text, bytes=memory.total)


def not_checked(facts: Facts) -> Iterator[Finding]:
    if facts.stages.jaxpr is None and facts.n_devices > 1:
        text = (
            'replicated compute, constraints and the shardings of activations were not checked: '
            'to check them, pass the function instead of the lowered or compiled program'
        )
        yield Finding('not checked', text)
    for opcode, lines in facts.graph.program.unknown.items():
        runs = f'{len(lines)} times, first' if len(lines) > 1 else 'once,'
        text = (
            f"einshard does not know XLA's operation '{opcode}', which the compiled program has "
            f'{runs} in line {lines[0]}: what it sends and computes is not counted'
        )
        yield Finding('not checked', text)


def asks_for_local_devices(facts: Facts) -> Iterator[Finding]:
    """Notes the lines that asked, while the function was traced, which devices this process has."""
    # the line is part of the text, since a suggestion for it does not answer this
    for text in asked_texts(facts.stages.jaxpr, facts.devices[0].device_kind):
        yield Finding('asks for local devices', text)
