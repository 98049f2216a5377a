"""Parameter trees of published models as shapes: nothing is allocated.

From the published configurations: hidden size, layers, heads, vocabulary. The input axis of a
kernel comes first, as in Flax. Each model has its published number of parameters next to it, which
tests/test_rules.py compares with the shapes.
"""

import jax
import jax.numpy as jnp


def kernel(*shape):
    return {'kernel': jax.ShapeDtypeStruct(shape, jnp.bfloat16)}


def weight(*shape):
    return {'weight': jax.ShapeDtypeStruct(shape, jnp.bfloat16)}


def embedding(*shape):
    return {'embedding': jax.ShapeDtypeStruct(shape, jnp.bfloat16)}


def grouped_attention(hidden, heads, kv_heads, head_size):
    return {
        'q_proj': kernel(hidden, heads * head_size),
        'k_proj': kernel(hidden, kv_heads * head_size),
        'v_proj': kernel(hidden, kv_heads * head_size),
        'o_proj': kernel(heads * head_size, hidden),
    }


def llama(hidden, layers, heads, kv_heads, mlp, vocab):
    """Llama: RMS norms, grouped heads, a gated feed-forward, an output head of its own."""
    gated = {
        'gate_proj': kernel(hidden, mlp),
        'up_proj': kernel(hidden, mlp),
        'down_proj': kernel(mlp, hidden),
    }
    return decoder(hidden, layers, heads, kv_heads, vocab, mlp=gated)


def mixtral(hidden, layers, heads, kv_heads, mlp, vocab, experts):
    """Mixtral: Llama with a router and experts, stacked along the first axis, per feed-forward."""
    routed = {
        'gate': kernel(hidden, experts),
        'experts': {
            'w1': kernel(experts, hidden, mlp),
            'w2': kernel(experts, mlp, hidden),
            'w3': kernel(experts, hidden, mlp),
        },
    }
    return decoder(hidden, layers, heads, kv_heads, vocab, block_sparse_moe=routed)


def decoder(hidden, layers, heads, kv_heads, vocab, **feed_forward):
    layer = {
        'input_layernorm': weight(hidden),
        'self_attn': grouped_attention(hidden, heads, kv_heads, hidden // heads),
        'post_attention_layernorm': weight(hidden),
        **feed_forward,
    }
    return {
        'model': {
            'embed_tokens': embedding(vocab, hidden),
            'layers': [layer] * layers,
            'norm': weight(hidden),
        },
        'lm_head': kernel(hidden, vocab),
    }


def gpt2(hidden, layers, positions, vocab):
    """GPT-2: layer norms and biases everywhere; the output head is the embedding."""

    def affine(n_in, n_out):
        bias = {'bias': jax.ShapeDtypeStruct((n_out,), jnp.float32)}
        return {'kernel': jax.ShapeDtypeStruct((n_in, n_out), jnp.float32), **bias}

    def norm():
        scale = jax.ShapeDtypeStruct((hidden,), jnp.float32)
        return {'scale': scale, 'bias': scale}

    layer = {
        'ln_1': norm(),
        'attn': {'c_attn': affine(hidden, 3 * hidden), 'c_proj': affine(hidden, hidden)},
        'ln_2': norm(),
        'mlp': {'c_fc': affine(hidden, 4 * hidden), 'c_proj': affine(4 * hidden, hidden)},
    }
    return {
        'transformer': {
            'wte': {'embedding': jax.ShapeDtypeStruct((vocab, hidden), jnp.float32)},
            'wpe': {'embedding': jax.ShapeDtypeStruct((positions, hidden), jnp.float32)},
            'h': [layer] * layers,
            'ln_f': norm(),
        }
    }


LLAMA_8B = llama(hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336, vocab=128256)
LLAMA_70B = llama(hidden=8192, layers=80, heads=64, kv_heads=8, mlp=28672, vocab=128256)
GPT2_XL = gpt2(hidden=1600, layers=48, positions=1024, vocab=50257)
MIXTRAL = mixtral(hidden=4096, layers=32, heads=32, kv_heads=8, mlp=14336, vocab=32000, experts=8)

PUBLISHED_PARAMETERS = {
    'Llama 3 8B': (LLAMA_8B, 8_030_261_248),
    'Llama 3 70B': (LLAMA_70B, 70_553_706_496),
    'GPT-2 XL': (GPT2_XL, 1_557_611_200),
    'Mixtral 8x7B': (MIXTRAL, 46_702_792_704),
}
