# %% [markdown]
"""# Work through the scaling book

    pip install '.[tpu]'
    python docs/examples/scaling_book.py

[How To Scale Your Model](https://jax-ml.github.io/scaling-book/) explains how large models are
sharded on TPUs. This page redoes its worked examples in einshard's notation: chapter 3 (sharded
matrices), chapter 5 (training) and chapter 6 (LLaMA 3). Numbers are recomputed here, most with
`parallelism` and `explain`; assertions compare them with the book's.
"""

# %%
import math

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from einshard import Chip, Rules, einsum, explain, make_sharding, parallelism, sharded, topology

# %% [markdown]
# ## Notation
#
# | the book | einshard | JAX prints |
# | --- | --- | --- |
# | `A[I, J]` | `i j` | `f32[8,4]` |
# | `A[I_X, J]` | `i@x j` | `f32[8@x,4]` |
# | `A[I_X, J_Y]` | `i@x j@y` | `f32[8@x,4@y]` |
# | `A[I_XY, J]` | `i@(x,y) j` | `f32[8@(x,y),4]` |
# | `A[I, J] {U_X}` | `i j +@x` | `f32[8,4]{U:x}` |
#
# In the notation, lower-case words name array axes, and an `@` comes before mesh axes. On a
# mesh with Explicit axes, the types of arrays have these shardings:

# %%
mesh = topology('v5e:4x4', x=4, y=4, axis_types=AxisType.Explicit)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


@sharded('i@(x,y) j', 'j k@x', mesh=mesh)
def product(a, b):
    print(jax.typeof(a), jax.typeof(b))
    return einsum('i j, j k -> i@y k@x', a, b)


product.eval_shape(bf16(32, 8), bf16(8, 16))

# %% [markdown]
# **Quiz of chapter 3.** How much memory does `int8[128, 2048]` with sharding `A[I_XY, J]` take
# on a mesh with X = 2, Y = 8, Z = 2?

# %%
mesh = topology('v5e:4x8', x=2, y=8, z=2)
shard = make_sharding('i@(x,y) j', mesh=mesh).shard_shape((128, 2048))
a_device, all_devices = math.prod(shard), math.prod(shard) * mesh.size
print(f'{a_device:,} bytes on a device, {all_devices // 2**10} KiB in total')
assert (a_device, all_devices) == (16_384, 512 * 2**10)

# %% [markdown]
# ## The four products of sharded matrices
#
# `parallelism` gives the cases of chapter 3, and the choices in each. Counts stand for mesh axes,
# by position: in `'i4 j 4, 4 j k4'` i and k have different mesh axes, in `'i4 j, j k4'` the same
# one.

# %%
CASES = {
    'neither contracted axis is sharded': 'i4 j 4, 4 j k4',
    'one contracted axis is sharded': 'i j4, 4 j k',
    'both are sharded along one mesh axis': 'i j4, j4 k',
    'two free axes along one mesh axis': 'i4 j, j k4',
}
for case, operands in CASES.items():
    step = parallelism(f'{operands} -> i k', sizes={'i': 64, 'j': 64, 'k': 64})
    print(f'{case}: {operands}')
    for choice in step.choices:
        sent = ', '.join(f'{one.kind} of {one.bytes:,} bytes' for one in choice.collectives)
        print(f'    {choice.result:20} {sent or "no communication"}')

# %% [markdown]
# ## How long a collective takes
#
# `explain` compiles for a TPU slice, and computes a lower bound on the time of each collective
# from the links of the slice. The book's rates are 10 % below Google's, which `explain` uses by
# default, so this page passes them as `chip=`. `link` is the rate of one link in one direction.

# %%
v5e = Chip('v5e', {'bf16': 1.97e14}, 16e9, 8.1e11, link=4.5e10, torus=2, wraps_at=16)
v5p = Chip('v5p', {'bf16': 4.59e14}, 96e9, 2.8e12, link=9e10, torus=3, wraps_at=4)
v4 = Chip('v4', {'bf16': 2.75e14}, 32e9, 1.2e12, link=4.5e10, torus=3, wraps_at=4)


def microseconds(spec, out, shape, mesh, chip):
    """The lower bound on the network time of -x, with a result of another sharding."""
    report = explain(sharded(spec, out=out, mesh=mesh)(jnp.negative), bf16(*shape), chip=chip)
    times = {bound.along: bound.seconds for bound in report.bounds if bound.resource == 'network'}
    print(f"'{spec}' to '{out}':", {axes: f'{1e6 * time:.0f} us' for axes, time in times.items()})
    return 1e6 * sum(times.values())


# %% [markdown]
# **AllGather along Y of `bf16[2048, 8192]`** on a v5e slice of 8 by 4. The book computes
# 377 us, and 560 us if you count that an axis of 4 chips is not a ring on v5e:

# %%
slice_8x4 = topology('v5e:8x4', x=8, y=4)
time = microseconds('e@y f', 'e f', (2048, 8192), slice_8x4, v5e)
assert round(time, -1) == 560

# %% [markdown]
# **Question 2 of chapter 3**: collectives of `bf16[1024, 4096]`, on a v4 slice of 4 by 4 by 4. A
# v4 chip can be two devices, so this uses the same torus of v5p chips, with the rates of v4. The
# book's answers are 23 us along X, and 46 us along X and Y. They do not count that a device already
# has one of the 4 or 16 shards, so the times here are 3/4 and 15/16 of the book's:

# %%
cube = topology('v5p:4x4x4', x=4, y=4, z=4)
time = microseconds('b@x d@y', 'b d@y', (1024, 4096), cube, v4)
assert round(time / (3 / 4)) == 23
time = microseconds('b@x d@y', 'b d', (1024, 4096), cube, v4)
assert int(time / (15 / 16)) == 46

# %% [markdown]
# ## Where data, FSDP and tensor parallelism stop scaling
#
# Chapter 5 compares the time of the products of an MLP, `x[B, D] @ W_in[D, F] @ W_out[F, D]`,
# with the time of its collectives. `parallelism` has their bytes. A ring sends in both
# directions, so a collective of V bytes along n dimensions of the torus takes V / (2 n link).

# %%
flops = v5p.flops['bf16']
intensity = flops / (2 * v5p.link)  # operations per byte sent


def collective_bytes(einsum, kind, **sizes):
    """The bytes of the first choice whose only collective is of this kind."""
    choices = parallelism(einsum, sizes=sizes, item_bytes=2).choices
    return next(
        one.collectives[0].bytes for one in choices if [c.kind for c in one.collectives] == [kind]
    )


print(f'{intensity:.0f} operations per byte')
assert round(intensity) == 2550

# %% [markdown]
# **FSDP** gathers each weight before its product. The products take longer than the collectives
# if a device has more than 2550 / n tokens:

# %%
D, F = 8192, 32768


def tokens_per_chip(chips, n):
    """The batch per chip at which an FSDP layer is limited by compute and network alike."""
    weight = collective_bytes(f'b{chips} d, d{chips} f -> b f', 'all-gather', b=chips, d=D, f=F)
    time = weight / (2 * n * v5p.link)
    return time * flops / (2 * D * F)


for n, chips in enumerate((4, 16, 64), 1):
    limit = tokens_per_chip(chips, n)
    print(f'FSDP over {chips:2} chips, {n} dimensions: {limit:.0f} tokens per chip')
    assert math.isclose(limit, intensity / n)

# %% [markdown]
# **Tensor parallelism** gathers and scatters activations. Its limit is n F / 2550 chips, whatever
# the batch:

# %%
B = 2**16


def tensor_chips(hidden, n, chips=4):
    """The chips at which a tensor parallel MLP is limited by compute and network alike."""
    up, down = f'b d{chips}, d f{chips} -> b f{chips}', f'b f{chips}, f{chips} d -> b d{chips}'
    sizes = {'b': B, 'd': D, 'f': hidden}
    sent = collective_bytes(up, 'all-gather', **sizes)
    sent += collective_bytes(down, 'reduce-scatter', **sizes)
    products = 4 * B * D * hidden / flops  # on one chip
    return products / (sent / (2 * n * v5p.link))


for model, hidden in {'LLaMA 3 70B': 28_672, 'F = 32,768': 32_768, 'Gemma 7B': 49_152}.items():
    print(f'{model}: {tensor_chips(hidden, 1):.1f} chips along one dimension')
    assert math.isclose(tensor_chips(hidden, 1), hidden / intensity)
assert int(tensor_chips(49_152, 1)) == 19  # the book's number for Gemma

# %% [markdown]
# **FSDP and tensor parallelism together.** FSDP sends weights, which are smaller with more tensor
# parallelism; tensor parallelism sends activations, which are smaller with more FSDP. On 64 v5p
# chips with 48 Ki tokens, the best mix is 16 by 4:


# %%
def network_seconds(fsdp, tensor, n_fsdp, n_tensor, *, b, d, f):
    """The time of an MLP's collectives in the forward pass, each over n dimensions of the torus."""
    sizes = {'b': b, 'd': d, 'f': f}
    seconds = 0.0
    if fsdp > 1:
        weight = f'b{fsdp} d {tensor}, d{fsdp} f{tensor} -> b f'
        seconds += 2 * collective_bytes(weight, 'all-gather', **sizes) / n_fsdp
    if tensor > 1:
        up = f'b{fsdp} d{tensor}, {fsdp} d f{tensor} -> b{fsdp} f{tensor}'
        down = f'b{fsdp} f{tensor}, {fsdp} f{tensor} d -> b{fsdp} d{tensor}'
        seconds += collective_bytes(up, 'all-gather', **sizes) / n_tensor
        seconds += collective_bytes(down, 'reduce-scatter', **sizes) / n_tensor
    return seconds / (2 * v5p.link)


def compare(meshes, **sizes):
    """Returns the mesh with the fastest collectives, all their times, and the products' time."""
    chips = math.prod(meshes[0][:2])
    products = 4 * math.prod(sizes.values()) / chips / flops
    print(f'products: {1e6 * products:6.0f} us')
    times = {mesh[:2]: network_seconds(*mesh, **sizes) for mesh in meshes}
    for (fsdp, tensor), time in times.items():
        print(f'FSDP {fsdp:4} x tensor {tensor:2}: network {1e6 * time:6.0f} us')
    return min(times, key=times.__getitem__), times, products


MESHES = [(64, 1, 3, 1), (16, 4, 2, 1), (4, 16, 1, 2), (1, 64, 1, 3)]
best, times, products = compare(MESHES, b=48 * 2**10, d=8192, f=32_768)
assert best == (16, 4)

# %% [markdown]
# The estimates of [`plan`](../plan.md#how-accurate-it-is) find this mix too, if the roles of the
# two mesh axes are given.
#
# ## LLaMA 3 70B
#
# Chapter 6 trains LLaMA 3 70B with batches of 4 Mi tokens on a pod of v5p. Its parameters:

# %%
L, D, F, HEADS, KV_HEADS, HEAD, VOCAB = 80, 8192, 28_672, 64, 8, 128, 128_256
shapes = {
    'embed': bf16(VOCAB, D),
    'head': bf16(D, VOCAB),
    'q': bf16(L, D, HEADS, HEAD),
    'k': bf16(L, D, KV_HEADS, HEAD),
    'v': bf16(L, D, KV_HEADS, HEAD),
    'o': bf16(L, HEADS, HEAD, D),
    'gate': bf16(L, D, F),
    'up': bf16(L, D, F),
    'down': bf16(L, F, D),
}
parameters = sum(math.prod(leaf.shape) for leaf in shapes.values())
print(f'{parameters / 1e9:.1f} billion parameters')
assert round(parameters / 1e9) in (70, 71)  # the book: 70.4

# %% [markdown]
# FSDP alone, over the batch and the sequence, leaves 468 tokens for each of 8,960 chips, where 850
# (2550 / 3) are needed. The best mix with tensor parallelism is limited by compute. The book rounds
# its formula to FSDP over 2,048 chips and tensor parallelism over 4, which uses 8,192 chips of the
# pod:

# %%
BATCH = 4 * 2**20
assert BATCH // 8960 == 468
print(f'{BATCH // 8960} tokens per chip, {tokens_per_chip(64, 3):.0f} needed')
MESHES = [(8192, 1, 3, 1), (4096, 2, 2, 1), (2048, 4, 2, 1), (1024, 8, 2, 1), (512, 16, 2, 1)]
best, times, products = compare(MESHES, b=BATCH, d=D, f=F)
assert best == (2048, 4)
assert times[8192, 1] > products > times[2048, 4]

# %% [markdown]
# A chip then holds weights and gradients in bf16, and two moments of Adam in f32. Together they
# take six times the memory of the weights:

# %%
rules = Rules(
    [
        ('embed', 'vocab d -> vocab@tensor d@fsdp'),
        ('head', 'd vocab -> d@fsdp vocab@tensor'),
        ('[qkv]$', 'l d heads k -> l d@fsdp heads@tensor k'),
        ('o$', 'l heads k d -> l heads@tensor k d@fsdp'),
        ('gate|up', 'l d f -> l d@fsdp f@tensor'),
        ('down', 'l f d -> l f@tensor d@fsdp'),
    ]
)
pod = AbstractMesh((2048, 4), ('fsdp', 'tensor'), axis_types=(AxisType.Auto,) * 2)
table = rules.table(shapes, mesh=pod)
weights = table.bytes_per_device
print(f'{weights / 2**20:.1f} MiB of weights, {6 * weights / 2**20:.0f} MiB in total')
assert weights * pod.size == 2 * parameters  # nothing is replicated
