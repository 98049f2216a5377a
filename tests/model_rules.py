"""Rules for published models, and the PartitionSpecs that they give, written by hand."""

import jax
import model_shapes
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from einshard import Rules

AXES = {'data': 2, 'fsdp': 4, 'expert': 2, 'tensor': 8}
MESH_128 = AbstractMesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 4)
REPLICATED = '... -> * ...'
INTO, OUT_OF = P('fsdp', 'tensor'), P('tensor', 'fsdp')

# by the last two keys of the path
LLAMA = {
    **dict.fromkeys([f'{name}_proj/kernel' for name in ('q', 'k', 'v', 'gate', 'up')], INTO),
    **dict.fromkeys(['o_proj/kernel', 'down_proj/kernel', 'embed_tokens/embedding'], OUT_OF),
    'lm_head/kernel': INTO,
    'input_layernorm/weight': P(),
    'post_attention_layernorm/weight': P(),
    'norm/weight': P(),
}
MIXTRAL = LLAMA | {
    'gate/kernel': P('fsdp'),
    'w1/kernel': P('expert', 'fsdp', 'tensor'),
    'w2/kernel': P('expert', 'tensor', 'fsdp'),
    'w3/kernel': P('expert', 'fsdp', 'tensor'),
}
GPT2 = {
    'wte/embedding': P(None, 'fsdp'),  # the rule has ('tensor', 'fsdp'), but 50,257 is odd
    'wpe/embedding': P(None, 'fsdp'),
    'c_attn/kernel': INTO,
    'c_fc/kernel': INTO,
    'c_proj/kernel': OUT_OF,
    'c_attn/bias': P('tensor'),
    'c_fc/bias': P('tensor'),
    'c_proj/bias': P(),
    **{f'ln_{i}/{kind}': P() for i in (1, 2, 'f') for kind in ('scale', 'bias')},
}
LLAMA_EXPRESSIONS = Rules(
    [
        ('embed_tokens/embedding', 'vocab embed -> vocab@tensor embed@fsdp'),
        ('(q|k|v)_proj/kernel', 'embed heads -> embed@fsdp heads@tensor'),
        ('o_proj/kernel', 'heads embed -> heads@tensor embed@fsdp'),
        ('(gate|up)_proj/kernel', 'embed mlp -> embed@fsdp mlp@tensor'),
        ('down_proj/kernel', 'mlp embed -> mlp@tensor embed@fsdp'),
        ('norm/weight', REPLICATED),
        ('lm_head/kernel', 'embed vocab -> embed@fsdp vocab@tensor'),
    ]
)
LLAMA_SPECS = Rules(
    [
        ('embed_tokens/embedding', OUT_OF),
        ('self_attn/(q_proj|k_proj|v_proj)/kernel', INTO),
        ('self_attn/o_proj/kernel', OUT_OF),
        ('mlp/(gate|up)_proj/kernel', INTO),
        ('mlp/down_proj/kernel', OUT_OF),
        ('(input|post_attention)_layernorm/weight', P(None)),
        ('lm_head/kernel', INTO),
        ('.*', P(None)),
    ]
)
MIXTRAL_RULES = Rules(
    [
        ('embed_tokens/|o_proj/', OUT_OF),
        ('w2/kernel$', 'expert mlp embed -> expert@expert mlp@tensor embed@fsdp'),
        ('experts', P('expert', 'fsdp', 'tensor')),
        ('moe/gate/', P('fsdp')),
        ('(q|k|v)_proj/|lm_head', INTO),
        ('norm/weight$', REPLICATED),
    ]
)
GPT2_PAIRS = [
    ('transformer/wte', OUT_OF),
    ('transformer/wpe', P(None, 'fsdp')),
    ('attn/c_attn/kernel', 'embed qkv -> embed@fsdp qkv@tensor'),
    ('c_proj/kernel', OUT_OF),
    ('/kernel$', INTO),
    ('c_(attn|fc)/bias$', P('tensor')),
    ('bias$|scale$', P()),
]


def by_hand(table, params):
    """The PartitionSpec of each parameter."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: table['/'.join(str(key.key) for key in path[-2:])], params
    )


# shapes, rules, PartitionSpecs
MODELS = {
    name: (shapes, rules, by_hand(table, shapes))
    for name, shapes, rules, table in [
        ('Llama 8B', model_shapes.LLAMA_8B, LLAMA_EXPRESSIONS, LLAMA),
        ('Llama 8B, PartitionSpecs', model_shapes.LLAMA_8B, LLAMA_SPECS, LLAMA),
        ('Llama 70B', model_shapes.LLAMA_70B, LLAMA_EXPRESSIONS, LLAMA),
        ('GPT-2 XL', model_shapes.GPT2_XL, Rules(GPT2_PAIRS, indivisible='replicate'), GPT2),
        ('Mixtral 8x7B', model_shapes.MIXTRAL, MIXTRAL_RULES, MIXTRAL),
    ]
}
