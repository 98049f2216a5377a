"""Ready axis rules for language models: where their axes live in training and in decoding."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

#: Placements for `axis_rules`, on a mesh with some of the axes data, fsdp, tensor, sequence and
#: expert. In activations the model axis goes by a name without a rule, such as d: `embed` is that
#: axis of the parameters, and `batch` has fsdp there.
TRAINING_AXES: Mapping[str, str] = MappingProxyType(
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
    }
)

#: The same for generating one token at a time from a cache of the ones before.
DECODING_AXES: Mapping[str, str] = MappingProxyType(
    {
        'batch': '@(data,fsdp)',  # requests have nothing to tell each other
        'sequence': '',  # of one token there is nothing to cut; of the cache, every step reads all
        'heads': '@tensor',  # a device attends with heads of its own ...
        'kv_heads': '@tensor',  # ... and holds their part of the cache
        'head_dim': '',  # cut, every score would be a sum over devices
        'embed': '',  # cut over fsdp, all parameters would be gathered again for each token
        'mlp': '@tensor',  # reading the parameters is what takes the time: each reads its part
        'vocab': '@tensor',  # likewise, and the logits are never whole on a device
        'expert': '@expert',  # experts stay where they are; tokens are few and go to them
    }
)
