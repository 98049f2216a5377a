"""Ready-made axis rules for language models, for training and for decoding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping


class AxisTable(Mapping[str, str]):
    """A read-only mapping of axis rules that, unlike `MappingProxyType`, can be pickled."""

    __module__ = 'einshard'  # pickles refer to the public name, einshard.TRAINING_AXES

    def __init__(self, name: str, placements: Mapping[str, str]):
        self._name = name
        self._placements = dict(placements)

    def __getitem__(self, axis: str) -> str:
        return self._placements[axis]

    def __iter__(self) -> Iterator[str]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)

    def __or__(self, other: Mapping[str, str]) -> dict[str, str]:
        return {**self, **other}

    def __ror__(self, other: Mapping[str, str]) -> dict[str, str]:
        return {**other, **self}

    def __repr__(self) -> str:
        return repr(self._placements)

    def __reduce__(self) -> str:
        return self._name


#: Axis rules for training on a mesh with axes data, fsdp, tensor, sequence and expert. If your mesh
#: lacks some of these, write `axis_rules(TRAINING_AXES, missing='replicate')`. `embed` is the
#: d_model axis of parameters. Activations shard `batch` over fsdp, so give their d_model axis a
#: name without a rule, such as `d`.
TRAINING_AXES: Mapping[str, str] = AxisTable(
    'TRAINING_AXES',
    {
        'batch': '@(data,fsdp)',
        'sequence': '@sequence',
        'heads': '@tensor',
        'kv_heads': '@tensor',
        'head_dim': '',
        'embed': '@fsdp',
        'mlp': '@tensor',
        'vocab': '@tensor',
        'expert': '@expert',
    },
)

#: Axis rules for decoding: one token at a time, with a KV cache.
DECODING_AXES: Mapping[str, str] = AxisTable(
    'DECODING_AXES',
    {
        'batch': '@(data,fsdp)',  # requests are independent
        'sequence': '',  # one token cannot be sharded; a sharded cache would need sums over devices
        'heads': '@tensor',  # each device computes its own heads ...
        'kv_heads': '@tensor',  # ... and stores the KV cache of these heads
        'head_dim': '',  # if sharded, each attention score would need an all-reduce
        'embed': '',  # if sharded, each token would all-gather all parameters
        'mlp': '@tensor',  # decoding is memory-bound: each device reads only its shard
        'vocab': '@tensor',  # as for mlp; also, no device holds all logits
        'expert': '@expert',  # weights stay in place; the few tokens are sent to them
    },
)
