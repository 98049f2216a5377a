"""Matches specs with a function's parameters, and flattens calls.

`jax.jit` with `in_shardings` accepts no keyword arguments, so a call is flattened to a list of
values and a `CallSignature`.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import keyword
import numbers
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .._errors import EinshardError, plural, quoted
from .._sharding.context import AxisRule
from .._text import first_of, name_of
from .._trees.specs import Spec, read_specs
from .annotations import read_annotations
from .value_spec import ValueSpec

LEFT_TO_COMPILER = 'None as the spec of {}, to leave the sharding to the compiler'

JIT_OPTIONS = frozenset(inspect.signature(jax.jit).parameters) - {'fun'}


@dataclass(frozen=True, slots=True)
class CallSignature:
    """How a call passes its values: the first `n_positional` by position, the rest by keyword."""

    n_positional: int
    keywords: tuple[str, ...]

    def split(self, values: Sequence[Any]) -> tuple[Sequence[Any], dict[str, Any]]:
        n = self.n_positional
        return values[:n], dict(zip(self.keywords, values[n:], strict=True))


class Parameters:
    """The parameters of a function. Without a signature, they are `*args, **kwargs`.

    Attributes:
        function: the name of the function.
        names: the names of the positional parameters, including `self`.
        positional_only, keyword_only: the names of these parameters.
        var_positional, var_keyword: the names of `*args` and `**kwargs`, or None.
        n_self: 1 if the first parameter is the `self` or `cls` of a method, else 0.
    """

    def __init__(self, function: Callable[..., Any]):
        self.function = name_of(function)
        self.qualname = getattr(function, '__qualname__', self.function)
        try:
            self.signature = inspect.signature(function)
        except (ValueError, TypeError):  # some builtins
            self.signature = inspect.signature(lambda *args, **kwargs: None)  # type: ignore[reportUnknownLambdaType]
        kinds: dict[Any, list[str]] = {}
        for parameter in self.signature.parameters.values():
            kinds.setdefault(parameter.kind, []).append(parameter.name)
        positional_only = kinds.get(inspect.Parameter.POSITIONAL_ONLY, [])
        self.names = (*positional_only, *kinds.get(inspect.Parameter.POSITIONAL_OR_KEYWORD, []))
        self.positional_only = frozenset(positional_only)
        self.keyword_only = tuple(kinds.get(inspect.Parameter.KEYWORD_ONLY, []))
        self.var_positional = next(iter(kinds.get(inspect.Parameter.VAR_POSITIONAL, [])), None)
        self.var_keyword = next(iter(kinds.get(inspect.Parameter.VAR_KEYWORD, [])), None)
        qualname = getattr(function, '__qualname__', '').split('.')
        is_in_class = len(qualname) > 1 and qualname[-2] != '<locals>'
        self.n_self = int(is_in_class and self.names[:1] in (('self',), ('cls',)))

    def flatten_call(
        self, n_args: int, keywords: Iterable[str]
    ) -> tuple[CallSignature, tuple[str, ...]]:
        """Returns the signature of a flattened call, and the order of its keywords.

        Makes keyword arguments positional where it can. For `def f(a, b, *, c)` and
        `f(1, c=3, b=2)`, returns `CallSignature(2, ('c',))` and `('b', 'c')`.
        """
        by_keyword = set(keywords)
        for name in self.names[:n_args]:
            if name in by_keyword and name not in self.positional_only:
                # raised here: otherwise, an error about the specs of these values could come first
                raise TypeError(f"{self.qualname}() got multiple values for argument '{name}'")
        now_positional: list[str] = []
        for name in self.names[n_args:]:
            if name not in by_keyword or name in self.positional_only:
                break
            now_positional.append(name)
        others = tuple(sorted(by_keyword.difference(now_positional)))
        return CallSignature(n_args + len(now_positional), others), (*now_positional, *others)

    def value_labels(self, call: CallSignature) -> tuple[str, ...]:
        """Returns the label of each value: its parameter or keyword, or 'args[2]' in `*args`.

        A keyword with the name of a positional-only parameter or of `*args` has the label
        "kwargs['x']".
        """
        named = self.names[: call.n_positional]
        rest = (f'{self.var_positional}[{i}]' for i in range(call.n_positional - len(named)))
        into_kwargs = self.positional_only | {self.var_positional}
        by_keyword = (self._keyword_label(name, into_kwargs) for name in call.keywords)
        return (*named, *rest, *by_keyword)

    def _keyword_label(self, name: str, into_kwargs: Collection[str | None]) -> str:
        return f"{self.var_keyword}['{name}']" if name in into_kwargs else name

    def accept(self, call: CallSignature) -> bool:
        """Whether Python accepts a call with these arguments."""
        try:
            self.signature.bind(*[None] * call.n_positional, **dict.fromkeys(call.keywords))
        except TypeError:
            return False
        return True

    def assign(self, by_position: Sequence[Any], by_name: Mapping[str, Any]) -> dict[str, Any]:
        """Returns {label: spec}."""
        names = self.names[self.n_self :]
        n_specs = len(by_position)
        if n_specs > len(names) and self.var_positional is None:
            besides = f' besides {self.names[0]}' if self.n_self else ''
            raise EinshardError(
                f'{self.function} has {plural(len(names), "positional parameter")}{besides}, '
                f'but {plural(n_specs, "spec")} {"was" if n_specs == 1 else "were"} given',
                code='spec',
                facts={
                    'parameters': ', '.join(names) or 'none',
                    **({'keyword-only': ', '.join(self.keyword_only)} if self.keyword_only else {}),
                },
            )
        labels = (*names, *(f'{self.var_positional}[{i}]' for i in range(n_specs - len(names))))
        assigned = dict(zip(labels, by_position, strict=False))
        for name, spec in by_name.items():
            self._check_can_have_spec(name)
            if name in assigned:
                raise EinshardError(
                    f"parameter '{name}' of {self.function} has two specs",
                    code='spec',
                    facts={'by position': repr(assigned[name]), 'by name': repr(spec)},
                )
            assigned[name] = spec
        return assigned

    def spec_for(self, label: str, specs: Mapping[str, Any], default: Any = None) -> Any:
        """Returns the spec of the argument with this label (see `value_labels`), or `default`.

        The spec of `*args` or `**kwargs` applies to each element that has no spec of its own.
        Returns None for `self`, and for an argument that the function does not take.
        """
        if label in specs:
            return specs[label]
        if self.var_positional is not None and label.startswith(f'{self.var_positional}['):
            return specs.get(self.var_positional, default)
        if label in self.names[: self.n_self]:
            return None
        if label not in self.names and label not in self.keyword_only:
            return specs.get(self.var_keyword, default) if self.var_keyword else None
        return default

    def check_required(
        self, specs: Mapping[str, Any], static: Collection[str], instead: str = LEFT_TO_COMPILER
    ) -> None:
        """Raises if only some of the parameters that every call passes have a spec.

        Without any specs, as in `sharded(out=...)`, the compiler shards all arguments. Parameters
        with a default are checked in the calls that pass them, as for `in_shardings` of `jax.jit`.
        """
        missing = [
            name
            for name, parameter in self.signature.parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            and name not in (*specs, *static, *self.names[: self.n_self])
        ]
        if specs and missing:
            raise self.no_spec_error(missing, specs, instead)

    def no_spec_error(
        self, labels: Sequence[str], specs: Mapping[str, Any], instead: str = LEFT_TO_COMPILER
    ) -> EinshardError:
        """Returns the error for arguments without a spec. Their names fill the {} in `instead`."""
        one = len(labels) == 1
        # an element of `*args` can have a spec of its own only by position
        names = quoted(label.partition('[')[0] for label in labels)
        return EinshardError(
            f'parameter{"" if one else "s"} {repr(labels[0]) if one else quoted(labels)} of '
            f'{self.function} {"has" if one else "have"} no spec',
            code='spec',
            facts={'with a spec': first_of([*specs], 8), 'try': instead.format(names)},
        )

    def _check_can_have_spec(self, name: str) -> None:
        names = [*self.names[self.n_self :], *self.keyword_only]
        names += [rest for rest in (self.var_positional, self.var_keyword) if rest is not None]
        if name in names or self.var_keyword is not None:
            return
        near = difflib.get_close_matches(name, [*names, *sorted(JIT_OPTIONS)], n=1)
        sentence = f"'{name}' is neither a parameter of {self.function} nor an option of jax.jit"
        if name in self.names:
            sentence = f"'{name}' of method {self.function} cannot have a spec"
        raise EinshardError(
            sentence,
            code='spec',
            facts={'parameters': ', '.join(names) or 'none'},
            fix=f'{near[0]}=' if near else None,
        )

    def pop_labels(self, options: dict[str, Any], prefix: str) -> frozenset[str]:
        """Pops jit options such as `static_argnums`, and returns the labels that they select."""
        by_number, by_name = f'{prefix}_argnums', f'{prefix}_argnames'
        argnums, argnames = options.pop(by_number, None), options.pop(by_name, None)
        listed = as_list(argnames, str, by_name, 'names of parameters', "('x',)")
        names = (*self.names, *self.keyword_only)
        for name in listed:
            if name not in names and self.var_keyword is None:
                raise EinshardError(
                    f"{by_name} includes '{name}', which is not a parameter of {self.function}",
                    code='spec',
                    facts={'parameters': ', '.join(names) or 'none'},
                )
        labels = {self._keyword_label(name, (self.var_positional,)) for name in listed}
        indices = as_list(argnums, numbers.Integral, by_number, 'indices of parameters', '(0,)')
        for i in indices:
            if self.var_positional is not None and i >= len(self.names):
                labels.add(f'{self.var_positional}[{i - len(self.names)}]')
            elif -len(self.names) <= i < len(self.names):
                labels.add(self.names[i])
            else:
                raise EinshardError(
                    f'{by_number} includes {i}, but {self.function} has '
                    f'{plural(len(self.names), "positional parameter")}',
                    code='spec',
                    facts={'parameters': ', '.join(self.names) or 'none'},
                )
        return frozenset(labels)


class Declaration:
    """The specs of a function, and its static and donated parameters.

    Attributes:
        specs: {label: parsed spec}, for `Parameters.spec_for`.
        static, donated: the labels of static and of donated parameters.
        is_annotated: whether the specs come from annotations.
        array_defaults: the defaults with arrays of parameters that have a spec.
    """

    def __init__(
        self,
        parameters: Parameters,
        specs: Mapping[str, Spec],
        out: Spec,
        static: frozenset[str],
        donated: frozenset[str],
        is_annotated: bool = False,
    ):
        self.parameters = parameters
        self.is_annotated = is_annotated
        self.static = static
        self.donated = donated
        in_both = sorted(static & donated)
        if in_both:
            raise EinshardError(
                f"parameter '{in_both[0]}' is both static and donated; only arrays can be donated",
                code='spec',
            )
        self.specs = {name: self._read(name, spec) for name, spec in specs.items()}
        self.result = ValueSpec(parameters.function, None, self._read('out=', out))
        # `flatten_call` passes these defaults as arguments, so that they are sharded
        self.array_defaults: dict[str, Any] = {}
        for name, parameter in parameters.signature.parameters.items():
            leaves = jtu.tree_leaves(parameter.default)
            has_arrays = any(isinstance(x, jax.Array | np.ndarray) for x in leaves)
            if has_arrays and self.specs.get(name) is not None:
                self.array_defaults[name] = parameter.default
        self._arguments: dict[CallSignature, tuple[ValueSpec, ...]] = {}

    def flatten_call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[CallSignature, tuple[str, ...], list[Any]]:
        """Returns the signature of a call, its keywords, and its values.

        The values are `args`, and then the value of each keyword. They include omitted parameters
        that have a spec and a default with arrays: positional-only ones after `args`, others by
        keyword.
        """
        if self.array_defaults:
            names, positional_only = self.parameters.names, self.parameters.positional_only
            args = [*args]
            for name in names[len(args) : len(positional_only)]:
                if name not in self.array_defaults:
                    break  # later ones cannot be passed without it
                args.append(self._default(name))
            given = {*names[: len(args)], *positional_only, *kwargs}
            by_keyword = {
                name: self._default(name) for name in self.array_defaults if name not in given
            }
            kwargs = {**by_keyword, **kwargs}
        call, order = self.parameters.flatten_call(len(args), kwargs)
        return call, order, [*args, *map(kwargs.__getitem__, order)]

    def arguments(self, call: CallSignature) -> tuple[ValueSpec, ...]:
        value_specs = self._arguments.get(call)
        if value_specs is None:
            # Python raises its own error for a call that it does not accept. In annotations, a
            # type that is not `Sharded` says that the compiler decides.
            is_complete = self.is_annotated or not (self.specs and self.parameters.accept(call))
            default = None if is_complete else _MISSING
            found: list[ValueSpec] = []
            for label in self.parameters.value_labels(call):
                # a static element of `*args` or `**kwargs` does not take their spec
                is_static = label in self.static
                spec = None if is_static else self.parameters.spec_for(label, self.specs, default)
                if spec is _MISSING:
                    raise self.parameters.no_spec_error([label], self.specs)
                found.append(ValueSpec(self.parameters.function, label, spec))
            value_specs = self._arguments[call] = tuple(found)
        return value_specs

    def _read(self, name: str, spec: Spec) -> Spec:
        if name in self.static and spec is not None:
            raise EinshardError(
                f"parameter '{name}' is static, so it cannot have a spec",
                code='spec',
                facts={'spec': repr(spec)},
            )
        try:
            return read_specs(spec)
        except EinshardError as error:
            owner = 'the result' if name == 'out=' else f"parameter '{name}'"
            raise error.about(spec_of=owner) from None

    def _default(self, name: str) -> Any:
        """Returns the default of a parameter, or a copy if jit donates the argument."""
        default = self.array_defaults[name]
        if name not in self.donated:
            return default
        return jtu.tree_map(
            lambda x: jax.device_put(x, may_alias=False) if isinstance(x, jax.Array) else x, default
        )


_MISSING: Any = object()


def declare(
    function: Any,
    in_specs: Sequence[Spec],
    out: Spec,
    named: Mapping[str, Any],
    rules: Sequence[AxisRule] | None = None,
) -> tuple[dict[str, Any], Declaration]:
    """Splits the arguments of `sharded` into options of `jax.jit` and a `Declaration`.

    Options that select parameters, such as `static_argnums`, go into the declaration. If there are
    no specs, reads the annotations of the function. With `rules`, those of jaxtyping count for all
    parameters without a spec.
    """
    for option in ('in_shardings', 'out_shardings'):
        if option in named:
            raise EinshardError(
                f'sharded does not take {option}=; it derives them from the specs',
                code='spec',
                facts={'instead': 'pass specs by position or by name, and out= for the result'},
            )
    options = {name: value for name, value in named.items() if name in JIT_OPTIONS}
    parameters = Parameters(function)
    specs = {name: spec for name, spec in named.items() if name not in options}
    static, donated = (parameters.pop_labels(options, prefix) for prefix in ('static', 'donate'))
    if parameters.n_self and 'cls' in parameters.names:
        static |= {'cls'}  # a class is not a pytree
    is_annotated = rules is not None or (not (in_specs or specs) and out is None)
    specs = parameters.assign(in_specs, specs)
    if is_annotated:
        own = parameters.names[: parameters.n_self]
        names = [name for name in parameters.signature.parameters if name not in own]
        annotated, annotated_out = read_annotations(function, names, static, rules)
        specs = parameters.assign((), annotated) | specs
        out = annotated_out if out is None else out
    declaration = Declaration(parameters, specs, out, static, donated, is_annotated)
    if not is_annotated:
        parameters.check_required(specs, static)
    return options, declaration


def copied(value: Any) -> Any:
    """Copies a list or an iterator to a tuple: a list may change, and an iterator is read once."""
    return tuple(value) if isinstance(value, list | Iterator) else value


def with_copied_options(named: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copied(x) if name in JIT_OPTIONS else x for name, x in named.items()}


def as_list(values: Any, item_type: type, option: str, expected: str, example: str) -> list[Any]:
    """Returns the values of an option as a list. Raises if one of them is not an `item_type`."""
    if values is None:
        return []
    items: list[Any] = [values]
    if not isinstance(values, str):
        with contextlib.suppress(TypeError):  # not iterable, or a 0-dimensional array
            items = [*values]
    if not all(isinstance(item, item_type) for item in items):
        raise EinshardError(
            f'{option}= must be {expected}, not {values!r}',
            code='spec',
            facts={'example': f'{option}={example}'},
        )
    return items


def positional_signature(names: Sequence[str]) -> inspect.Signature:
    """Returns a signature with positional-only parameters. Renames 'args[0]' to 'args_0'."""
    valid_names: list[str] = []
    for name in names:
        name = ''.join(c if f'_{c}'.isidentifier() else '_' for c in name.removesuffix(']'))
        if not name.isidentifier():  # such as '0_weight'
            name = f'_{name}'
        while name in valid_names or keyword.iskeyword(name):
            name += '_'
        valid_names.append(name)
    kind = inspect.Parameter.POSITIONAL_ONLY
    return inspect.Signature([inspect.Parameter(name, kind) for name in valid_names])
