"""The logical axis rules of MaxText, and the axis tuples of its arrays, in August 2026.

https://github.com/AI-Hypercomputer/maxtext has the rules in `configs/base.yml`, and the tuples in
its Python files. Here 'batch' stands for 'activation_embed_and_logits_batch'.
"""

MESH_AXES = (
    'diloco',
    'data',
    'stage',
    'fsdp',
    'fsdp_transpose',
    'context',
    'context_usp_ulysses',
    'context_autoregressive',
    'tensor',
    'tensor_sequence',
    'expert',
    'autoregressive',
)

# an axis name, and its mesh axes
_RULES = """
circular_repeats:
batch: data stage fsdp fsdp_transpose expert
batch_sequence: data stage fsdp fsdp_transpose context context_usp_ulysses expert
activation_vocab: tensor tensor_sequence
activation_vocab: tensor
activation_vocab: tensor_sequence
vocab: tensor tensor_sequence autoregressive
embed_vocab: fsdp fsdp_transpose context context_usp_ulysses expert
activation_batch_attn: data fsdp fsdp_transpose expert
activation_input_length_attn: tensor_sequence context
activation_heads: tensor tensor_sequence autoregressive
activation_kv_heads: tensor tensor_sequence
activation_length_attn: context context_usp_ulysses
activation_q_length: context context_usp_ulysses
activation_kv_length:
activation_embed_attn: tensor
activation_kv: tensor tensor_sequence
activation_kv_batch: data fsdp fsdp_transpose expert
activation_kv_head_dim: tensor tensor_sequence
heads: tensor tensor_sequence autoregressive
q_heads: tensor tensor_sequence autoregressive
kv_heads: tensor tensor_sequence autoregressive
qkv:
kv:
kv_head_dim:
q_lora: fsdp fsdp_transpose context context_usp_ulysses expert
q_lora: fsdp context context_usp_ulysses expert
q_lora_up_proj:
kv_lora: fsdp fsdp_transpose context context_usp_ulysses expert
kv_lora: fsdp context context_usp_ulysses expert
kv_lora_up_proj:
activation_batch_moe: data fsdp fsdp_transpose expert
activation_length_moe: context context_usp_ulysses
activation_norm_length_moe: tensor_sequence context context_usp_ulysses
activation_embed_moe: tensor
activation_mlp_moe: tensor tensor_sequence
activation_exp: expert
exp: expert
mlp_moe: fsdp_transpose tensor tensor_sequence autoregressive
embed_moe: fsdp fsdp_transpose context context_usp_ulysses
embed_moe: fsdp context context_usp_ulysses
activation_mlp: tensor tensor_sequence
activation_batch: data fsdp fsdp_transpose expert
activation_length: context context_usp_ulysses
activation_norm_length: tensor_sequence context context_usp_ulysses
activation_embed: tensor
activation_stage: stage
mlp: fsdp_transpose tensor tensor_sequence autoregressive
gdn_head: fsdp_transpose tensor tensor_sequence autoregressive
embed: fsdp fsdp_transpose context context_usp_ulysses expert
embed: fsdp context context_usp_ulysses expert
norm: tensor
layers: stage
diloco: diloco
engram_dim: tensor
dense_layers:
moe_layers:
local_layers:
mhc:
prefill_activation_length: context context_usp_ulysses
prefill_activation_norm_length: tensor_sequence context context_usp_ulysses
activation_prefill_kv_batch: data fsdp fsdp_transpose expert
decode_batch: data fsdp fsdp_transpose expert
decode_length:
cache_heads: autoregressive tensor tensor_sequence
paged_kv_heads: tensor
cache_batch_prefill:
cache_batch:
cache_heads_none:
cache_kv:
cache_sequence:
num_pages:
tokens_per_page:
paged_kv_head_dim_size:
mlp_no_fsdp: tensor tensor_sequence autoregressive
exp_with_fsdp: fsdp
"""

# a line for each array: the names of its axes, '-' for None
_TUPLES = """
activation_batch activation_length activation_embed
activation_batch activation_length activation_heads activation_kv
activation_batch activation_length activation_mlp
activation_batch activation_length q_heads
activation_batch activation_length -
activation_batch activation_length - -
activation_batch activation_length - - -
activation_batch activation_norm_length activation_embed
activation_batch activation_norm_length activation_mlp
activation_batch activation_norm_length - -
activation_batch activation_norm_length - - -
activation_batch prefill_activation_length activation_embed
activation_batch prefill_activation_length activation_mlp
activation_batch prefill_activation_norm_length activation_embed
activation_batch - -
activation_batch - - -
activation_batch_attn activation_heads activation_kv_length activation_kv
activation_batch_attn activation_heads activation_length activation_kv
activation_batch_attn activation_heads - prefill_activation_length activation_kv_length
activation_batch_attn activation_input_length_attn activation_embed_attn
activation_batch_attn activation_kv_length
activation_batch_attn activation_kv_length activation_heads activation_kv
activation_batch_attn activation_length activation_embed
activation_batch_attn activation_length activation_heads activation_kv
activation_batch_attn activation_length_attn activation_heads activation_kv
activation_batch_attn activation_q_length
activation_batch_attn activation_q_length activation_kv_length
activation_batch_attn prefill_activation_length activation_heads activation_kv
activation_batch_moe activation_length_moe -
activation_batch_moe activation_norm_length_moe activation_embed_moe
activation_batch_moe activation_norm_length_moe - activation_embed_moe
activation_batch_moe activation_norm_length_moe - -
activation_batch_moe activation_norm_length_moe - - -
activation_batch_moe - -
activation_embed -
batch activation_length
batch activation_length activation_embed
batch activation_length activation_vocab
batch activation_norm_length
batch prefill_activation_length activation_embed
batch_sequence activation_embed
batch_sequence activation_vocab
batch_sequence
activation_exp activation_batch_moe - activation_embed_moe
activation_exp activation_batch_moe - activation_mlp
activation_exp activation_batch_moe - - activation_embed_moe
activation_exp activation_batch_moe - - activation_mlp
activation_heads activation_length
activation_heads
activation_kv_batch activation_kv_heads - -
activation_kv_batch activation_length activation_kv_heads activation_kv_head_dim
activation_kv_batch activation_length kv_lora_up_proj
activation_kv_batch activation_length q_lora_up_proj
activation_kv_batch activation_length_attn activation_kv_heads activation_kv_head_dim
activation_kv_batch - activation_kv_heads
activation_kv_batch - activation_kv_heads -
activation_kv_length activation_heads - - -
activation_length -
activation_norm_length_moe activation_batch_moe - activation_embed_moe
activation_norm_length_moe activation_batch_moe - - -
activation_prefill_kv_batch prefill_activation_length activation_embed
activation_prefill_kv_batch prefill_activation_length activation_embed_attn
activation_prefill_kv_batch prefill_activation_length activation_heads activation_kv
activation_prefill_kv_batch prefill_activation_length activation_kv_heads activation_kv_head_dim
activation_prefill_kv_batch prefill_activation_length kv_lora_up_proj
activation_prefill_kv_batch prefill_activation_length q_lora_up_proj
activation_q_length
cache_batch cache_heads cache_sequence
cache_batch cache_heads cache_sequence cache_kv
cache_batch cache_sequence
cache_batch cache_sequence cache_heads cache_kv
cache_batch cache_sequence cache_heads_none cache_kv
cache_batch
cache_batch_prefill cache_sequence
cache_batch_prefill cache_sequence cache_heads cache_kv
cache_batch_prefill cache_sequence cache_heads_none cache_kv
decode_batch decode_length activation_embed
decode_batch decode_length activation_embed_attn
decode_batch decode_length activation_heads activation_kv
decode_batch decode_length activation_kv_heads activation_kv
diloco
embed gdn_head
embed heads kv
embed indexer_weights
embed kv
embed kv_heads kv_head_dim
embed kv_lora_up_proj
embed mlp
embed num_activations mlp
embed q_heads
embed q_heads kv
embed q_lora
embed q_lora_up_proj
embed qkv heads kv
embed -
embed
embed_moe mlp_moe -
embed_moe -
embed_moe - mlp_moe
embed_vocab vocab
engram_dim embed
engram_dim mhc embed
exp activation_embed
exp activation_mlp
exp embed_moe mlp_moe
exp mlp -
exp mlp_moe embed_moe
exp mlp_no_fsdp -
exp - mlp
exp - mlp_no_fsdp
exp
exp_with_fsdp mlp -
exp_with_fsdp mlp_no_fsdp -
exp_with_fsdp - mlp
exp_with_fsdp - mlp_no_fsdp
expert_only embed_moe -
expert_only - embed_moe
gdn_head embed
groups embed mlp
heads kv embed
kv_lora kv_heads kv_head_dim
layers
layers_per_stage layers circular_repeats
mlp embed
norm
num_tile batch_sequence
num_tile batch_sequence activation_embed
o_lora_up_proj embed
q_lora indexer_q
q_lora q_heads kv
vocab embed_vocab
- activation_batch_moe activation_norm_length_moe - activation_embed_moe
- layers activation_length
- mlp_no_fsdp -
- - activation_vocab
- - mlp_no_fsdp
"""


def rules() -> list[tuple[str, str | tuple[str, ...] | None]]:
    """The rules as Flax takes them: a mesh axis, several, or none."""
    pairs = []
    for line in _RULES.split('\n')[1:-1]:
        name, _, axes = line.partition(':')
        axes = tuple(axes.split())
        pairs.append((name, axes[0] if len(axes) == 1 else axes or None))
    return pairs


def tuples() -> list[tuple[str | None, ...]]:
    return [
        tuple(None if name == '-' else name for name in line.split())
        for line in _TUPLES.split('\n')[1:-1]
    ]
