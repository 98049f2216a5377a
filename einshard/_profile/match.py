"""Finds the program of a report in a trace: the program decides, not its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .._errors import EinshardError
from .form import Form, alike, difference
from .trace import Trace


@dataclass(frozen=True)
class Match:
    """The program of a trace that is that of the report.

    Attributes:
        name: 'jit_step(2)'.
        form: as the trace has it.
        renamed: its collectives to those of the report, if its kernels differ; None if it is equal.
    """

    name: str
    form: Form
    renamed: Mapping[str, str] | None = None

    @property
    def number(self) -> int:
        return number_of(self.name)


def number_of(name: str) -> int:
    """The program id in 'jit_step(2)'; it may have 64 bits, as on TPU, and be negative."""
    digits = name.rpartition('(')[2].rstrip(')')
    return int(digits) % 2**64 if digits.lstrip('-').isdecimal() else -1


def find_programs(
    ours: Form, trace: Trace, program: int | None, kernels_may_differ: bool
) -> list[Match]:
    """Returns the programs of a trace that are equal to that of a report.

    A trace also has programs of the process that did not run meanwhile, so that several may be
    equal. If none is, returns those with the same collectives.

    Args:
        program: the number of the only one to compare.
        kernels_may_differ: whether another compilation may choose other kernels, as for GPUs.

    Raises:
        EinshardError: there are none.
    """
    forms = trace.forms
    if program is not None:
        forms = {name: form for name, form in forms.items() if number_of(name) == program % 2**64}
        if not forms:
            raise EinshardError(
                f'the trace has no program with the number {program}',
                code='profile',
                facts=_listed(trace.forms),
            )
    equal = [Match(name, form) for name, form in forms.items() if form == ours]
    if not equal and kernels_may_differ:
        joined = {name: alike(ours, form) for name, form in forms.items()}
        equal = [Match(name, forms[name], each) for name, each in joined.items() if each]
    if equal:
        return equal
    # the first difference to the program that has most in common
    common = {
        name: sum(op == ours.get(op.name) for op in form.values()) for name, form in forms.items()
    }
    nearest = max(common, key=lambda name: common[name])
    raise EinshardError(
        'the trace does not have the program of the report',
        code='profile',
        facts={
            **_listed(trace.forms),
            f'first difference to {nearest}': difference(ours, forms[nearest]),
            'instead': 'trace and explain the function in one process, with the same arguments',
        },
    )


_MAX_LISTED = 8


def _listed(forms: Mapping[str, Form]) -> dict[str, str]:
    names = list(forms)
    more = f' and {len(names) - _MAX_LISTED} more' * (len(names) > _MAX_LISTED)
    return {'programs in the trace': ', '.join(names[:_MAX_LISTED]) + more}


def only_one(matches: Sequence[Match]) -> Match:
    """Returns the program that ran.

    Raises:
        EinshardError: several did.
    """
    if len(matches) > 1:
        first = matches[0]
        raise EinshardError(
            f'{len(matches)} programs of the trace are equal to that of the report, and ran',
            code='profile',
            facts={
                'equal': ', '.join(match.name for match in matches),
                'instead': f'pass program={first.number}, the number in {first.name}',
            },
        )
    return matches[0]
