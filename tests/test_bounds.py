"""Lower bounds on time: the table of chips, the geometry of networks, and what explain says."""

import dataclasses
import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from placed import mesh_of, struct

from einshard import Chip, EinshardError, explain, sharded
from einshard._chips.table import GPUS, as_chip, find_chip

# private: bounds of programs and chips that no device here can compile for
from einshard._program.cost.bounds import Bound, find_bounds
from einshard._program.cost.network import Network
from einshard._program.hlo.collective import Collective
from einshard._program.hlo.find_collectives import find_collectives
from einshard._program.hlo.graph import Graph
from einshard._program.hlo.hbm_traffic import min_hbm_bytes
from einshard._program.hlo.sources import operations
from einshard._program.hlo.temporaries import largest_temporaries
from einshard._program.hlo.text import ArrayType, HloModule
from einshard._text import format_seconds

GB = 10**9


def tpus(*sizes, slices=1, cores=1):
    """Devices of TPU slices, as JAX describes them."""
    places = itertools.product(range(slices), *map(range, sizes), range(cores))
    return [
        SimpleNamespace(id=i, slice_index=at[0], coords=list(at[1:-1]), core_on_chip=at[-1])
        for i, at in enumerate(places)
    ]


def gpus(n):
    return [SimpleNamespace(id=i) for i in range(n)]


def gpus_of(domains, size):
    """GPUs as `topology` describes them; JAX says that all are in slice 0."""
    return [
        SimpleNamespace(id=i, platform='gpu', slice_index=0, coords=[i // size, 0, i % size])
        for i in range(domains * size)
    ]


def collective(kind, groups, n_bytes, pairs=()):
    arrays = (ArrayType('s8', (int(n_bytes),)),)
    groups = tuple(tuple(map(int, group)) for group in groups)
    return Collective(kind, 'it', arrays, arrays, groups, pairs, 0)


def permute(pairs, n_bytes=50 * GB):
    return collective('collective-permute', (), n_bytes, tuple(pairs))


def grid(*sizes):
    return np.arange(math.prod(sizes)).reshape(sizes)


def along(axis, *sizes):
    """The groups along one axis of a grid."""
    return np.moveaxis(grid(*sizes), axis, -1).reshape(-1, sizes[axis])


# --- the scaling book, with its figures for links -------------------------------------------------

V4 = dataclasses.replace(as_chip('TPU v4'), link=4.5e10)
V5E = dataclasses.replace(as_chip('TPU v5e'), link=4.5e10)
H100 = as_chip('H100')


@pytest.mark.parametrize(
    ('name', 'chip'),
    [
        *((name, 'H100') for name in ('H100', 'h100')),
        *((name, 'TPU v5e') for name in ('TPU v5e', 'tpu v5e', 'v5e', 'V5E', 'tpu-v5e')),
        *((name, 'A100 80GB') for name in ('a100', 'a100 80gb', 'A100-80GB')),
        ('a100-40gb', 'A100 40GB'),
        ('gb300', 'GB300'),
        ('tpu7x', 'TPU7x'),
    ],
)
def test_names_of_chips(name, chip):
    assert as_chip(name) is as_chip(chip)


@pytest.mark.parametrize('name', ['GPUS', 'h1000', 'v9', '', 'H100 PCIe', None, 5])
def test_unknown_chips(name):
    with pytest.raises(EinshardError, match='is not a known chip'):
        as_chip(name)


@pytest.mark.parametrize('name', GPUS)
def test_names_of_topologies_name_chips(name):
    assert as_chip(name) is find_chip(GPUS[name].kind)


def test_book_all_gather_on_a_line():
    """Chapter 3, pop quiz 2: bf16[2048,8192] along 4 of a v5e 8x4; no ring: 3 hops, 560 us."""
    gather = collective('all-gather', along(1, 8, 4), 2048 * 8192 * 2)
    by_hand = 3 * (512 * 8192 * 2) / 4.5e10
    assert Network(tpus(8, 4), V5E).seconds(gather) == pytest.approx(by_hand)
    assert by_hand == pytest.approx(560e-6, rel=0.01)


def test_book_all_gathers_on_rings():
    """Chapter 3, question 2: v4 4x4x4 with rings, 1024 x 4096 in bf16: 23, 46 and 190 us.

    The book leaves out (n-1)/n.
    """
    network = Network(tpus(4, 4, 4), V4)
    full = 2 * 1024 * 4096
    one_axis = collective('all-gather', along(0, 4, 4, 4), full / 4)
    assert network.seconds(one_axis) == pytest.approx(3 / 4 * (full / 4) / 9e10)
    assert (full / 4) / 9e10 == pytest.approx(23e-6, rel=0.02)
    two_axes = collective('all-gather', grid(4, 4, 4).transpose(2, 0, 1).reshape(4, 16), full)
    assert network.seconds(two_axes) == pytest.approx(15 / 16 * full / (2 * 9e10))
    assert full / (2 * 9e10) == pytest.approx(46e-6, rel=0.02)
    summed = collective('all-reduce', along(2, 4, 4, 4), full)
    assert network.seconds(summed) == pytest.approx(3 / 4 * 2 * full / 9e10)
    assert 2 * full / 9e10 == pytest.approx(190e-6, rel=0.02)


def test_book_gather_to_a_corner():
    """Chapter 2, question 6: 15 GB over the two links of a corner of v5e 4x4: 167 ms."""
    gather = collective('all-gather', grid(1, 16), 16 * GB)
    assert Network(tpus(4, 4), V5E).seconds(gather) == pytest.approx(15e9 / (2 * 4.5e10))


def test_book_all_to_all_costs_a_quarter_of_an_all_gather():
    """Chapter 3: on a ring of n devices, for an array of V bytes, V / (4 * both directions)."""
    network, full = Network(tpus(16, 16), V5E), 16 * GB
    exchange = collective('all-to-all', along(1, 16, 16), full / 16)
    assert network.seconds(exchange) == pytest.approx(full / (4 * 9e10))


def test_book_gpu_node():
    """Chapter 12: an all-gather of 512 MiB in an H100 node takes 1.04 ms; an all-to-all B/(8W)."""
    network, full = Network(gpus(8), H100), 4096 * 65536 * 2
    gather = network.seconds(collective('all-gather', grid(1, 8), full))
    assert gather == pytest.approx(full * 7 / 8 / 450e9)
    assert gather == pytest.approx(1.04e-3, rel=0.01)
    exchange = network.seconds(collective('all-to-all', grid(1, 8), full / 8))
    assert exchange == pytest.approx(full * 7 / 64 / 450e9)


def test_nvlink_domains():
    """A domain of GB200 has up to 72 GPUs, and all of the GPUs in it have their own NIC."""
    chip = as_chip('GB200')
    rack = collective('all-gather', grid(1, 72), 72 * GB)
    assert Network(gpus_of(1, 72), chip).seconds(rack) == pytest.approx(71 * GB / 900e9)
    assert Network(gpus(72), chip).seconds(rack) == pytest.approx(71 * GB / 900e9)
    pairs = collective('all-gather', grid(2, 36).T, 2 * GB)
    across = Network(gpus_of(2, 36), chip)  # two halves of racks
    assert across.n_slices == 2
    assert across.seconds(pairs) == pytest.approx(GB / 50e9)
    assert Network(gpus(72), chip).seconds(pairs) == pytest.approx(GB / 900e9)


@pytest.mark.parametrize('size', [1, 4, 7, 8])
def test_domains_that_are_not_full(size):
    """Each GPU has one NIC: GPUs that are not in the program add none."""
    network = Network(gpus_of(3, size), H100)
    assert list(network.slices) == [i // size for i in range(3 * size)]
    summed = collective('all-reduce', grid(1, 3 * size), GB)
    leaves = GB / (size * 50e9)  # the sums of a domain leave it at least once
    assert network.seconds(summed) == pytest.approx(max(leaves, GB / (450e9 + 50e9)))


def test_old_name_of_domain():
    with pytest.warns(DeprecationWarning, match='node= of Chip is now domain='):
        chip = Chip('x', {'bf16': 1e15}, 1e11, 4e12, 1e11, node=4)
    assert chip == Chip('x', {'bf16': 1e15}, 1e11, 4e12, 1e11, domain=4)
    assert chip == Chip('x', {'bf16': 1e15}, 1e11, 4e12, 1e11, 0, 1, 4)
    assert dataclasses.replace(chip, domain=2).domain == 2
    with pytest.warns(DeprecationWarning, match='.node is deprecated; use .domain'):
        assert chip.node == 4


@pytest.mark.parametrize('name', GPUS)
def test_rates_of_gpus_agree_with_their_parts(name):
    gpu, chip = GPUS[name], as_chip(name)
    assert chip.memory_bandwidth == pytest.approx(gpu.bandwidth, rel=0.05)
    both_ways = {8: 600e9, 9: 900e9, 10: 1.8e12, 12: 128e9}  # NVIDIA's figures for NVLink, and PCIe
    assert chip.link == both_ways[gpu.capability[0]] / 2


def test_book_gpu_nodes():
    """Chapter 12: between many nodes an array leaves a node at 400 GB/s."""
    network, full = Network(gpus(64), H100), 8 * GB
    groups = grid(8, 8).T  # the GPUs with the same place in each node
    found = network.seconds(collective('all-gather', groups, full / 8))
    assert found == pytest.approx(7 / 8 * full / 400e9)


# --- formulas by hand -----------------------------------------------------------------------------

RINGS = Network(tpus(16, 16), as_chip('TPU v5e'))  # 50 GB/s per link and direction


@pytest.mark.parametrize(
    ('groups', 'gathered', 'summed'),
    [
        (along(1, 16, 16), 15 / 16 / 2, 15 / 16),  # a ring: two links into each chip
        (grid(64, 4), 3 / 4, 1),  # 4 neighbors in a ring are a line: one link into its end
        (grid(32, 8), 7 / 8, 1),
        (grid(16, 4, 4).transpose(0, 2, 1).reshape(64, 4), 3 / 2, 2),  # every fourth of a ring
        (grid(4, 4, 4, 4).transpose(0, 2, 1, 3).reshape(16, 16), 15 / 32, 30 / 48),  # blocks
        (grid(1, 256), 255 / 256 / 4, 2 * 255 / 1024),  # all: four links into each chip
    ],
)
def test_groups_in_a_torus(groups, gathered, summed):
    for kind, seconds in (
        ('all-gather', gathered),
        ('reduce-scatter', gathered),
        ('all-reduce', summed),
    ):
        assert RINGS.seconds(collective(kind, groups, 50 * GB)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ('name', 'sizes', 'axis', 'links'),
    [
        ('TPU v5e', (8, 16), 1, 2),  # the longer dimension wraps around
        ('TPU v5e', (8, 16), 0, 1),
        ('TPU v6e', (8, 8), 0, 1),
        ('TPU v5p', (4, 4, 8), 2, 2),
        ('TPU v5p', (2, 4, 4), 2, 1),  # not made of full cubes
        ('TPU7x', (4, 4, 4), 0, 2),
    ],
)
def test_wrap_around(name, sizes, axis, links):
    chip = as_chip(name)
    gather = collective('all-gather', along(axis, *sizes), chip.link)
    n = sizes[axis]
    assert Network(tpus(*sizes), chip).seconds(gather) == pytest.approx((n - 1) / n / links)


def test_permutes():
    """A shift sends over one link; on a line, the last sends back through all others."""
    for by in (1, 2):
        shift = permute((i, i // 16 * 16 + (i + by) % 16) for i in range(256))
        assert RINGS.seconds(shift) == pytest.approx(by)
    assert RINGS.seconds(permute([(0, 17)])) == pytest.approx(1 / 2)  # over both dimensions


def test_two_directions_of_a_line_at_once():
    """The last chip of 4 receives 3/4 of the all-gather and sends 3/4 of the reduce-scatter."""
    line, groups = Network(tpus(4), V5E), grid(1, 4)
    gather, scatter = (collective(k, groups, V5E.link) for k in ('all-gather', 'reduce-scatter'))
    assert line.seconds(gather) == line.seconds(scatter) == pytest.approx(3 / 4)
    assert line.seconds(gather, scatter) == pytest.approx(1)
    assert line.seconds_in_turn(gather, scatter) == pytest.approx(3 / 2)
    assert line.seconds(gather, gather) == pytest.approx(3 / 2)


def test_shifts_in_both_directions_at_once():
    """As for the halos of a convolution; the same shift twice takes twice as long."""
    line = Network(tpus(4), V5E)
    right = permute([(0, 1), (1, 2), (2, 3)], V5E.link)
    left = permute([(3, 2), (2, 1), (1, 0)], V5E.link)
    assert line.seconds(right, left) == line.seconds(right) == pytest.approx(1)
    assert line.seconds(right, right) == pytest.approx(2)
    pairs = [permute([pair], V5E.link) for pair in ((0, 1), (2, 3))]
    assert line.seconds(*pairs) == line.seconds_in_turn(*pairs) == pytest.approx(1)


def test_broadcasts_leave_their_source():
    """From both ends of a line, they take as long as one; from the same end, twice as long."""
    line = Network(tpus(4), V5E)
    first, last = (
        collective('collective-broadcast', [group], V5E.link)
        for group in ((0, 1, 2, 3), (3, 0, 1, 2))
    )
    assert line.seconds(first) == line.seconds(first, last) == pytest.approx(1)
    assert line.seconds(first, first) == pytest.approx(2)
    nodes, slow = Network(gpus(16), H100), 8 * H100.network  # bytes per second of a node
    across = (collective('collective-broadcast', [pair], slow) for pair in ((0, 8), (8, 0)))
    assert nodes.seconds(*across) == pytest.approx(1)


def test_two_devices_of_a_chip_share_its_links():
    network = Network(tpus(4, 4, 4, cores=2), as_chip('TPU7x'))
    on_chip = collective('all-reduce', grid(64, 2), 100 * GB)
    assert network.seconds(on_chip) == 0
    across = collective('all-gather', along(2, 4, 4, 4, 2), 100 * GB)  # both cores, in turn
    assert network.seconds(across) == pytest.approx(2 * 3 / 4 / 2)


def test_slices_are_joined_by_the_slow_network():
    """All 256 chips of a slice send at 25 Gbit/s."""
    network = Network(tpus(16, 16, slices=2), as_chip('TPU v5e'))
    summed = collective('all-reduce', grid(2, 256).T, GB)
    assert network.seconds(summed) == pytest.approx(GB / 3.125e9)
    two_cores = Network(tpus(4, 4, 4, slices=2, cores=2), as_chip('TPU7x'))  # share the network
    summed = collective('all-reduce', grid(2, 128).T, GB)
    assert two_cores.seconds(summed) == pytest.approx(2 * GB / 12.5e9)


def test_devices_without_coordinates_may_be_neighbors():
    network = Network(gpus(16), as_chip('TPU v5e'))
    gather = collective('all-gather', grid(4, 4), 50 * GB)
    assert network.seconds(gather) == pytest.approx(3 / 4 / 4)


@pytest.mark.parametrize('kind', ['custom-call', 'ragged-all-to-all'])
def test_collectives_that_send_an_unknown_number_of_bytes(kind):
    assert RINGS.seconds(collective(kind, grid(16, 16), GB)) == 0


def loads(network, kind, groups, busy):
    """The load of the busiest link if each device sends to each other on a shortest path.

    Adds to the loads in `busy`: {link: load}.
    """
    for group in groups:
        for a, b in itertools.permutations(group, 2):
            at = list(network.positions[a])
            for axis, (size, wraps) in enumerate(zip(network.sizes, network.wraps, strict=True)):
                ahead = (network.positions[b][axis] - at[axis]) % size
                forward = 2 * ahead <= size if wraps else network.positions[b][axis] > at[axis]
                while at[axis] != network.positions[b][axis]:
                    link = (*at, axis, forward)
                    rounds = 2 if kind == 'all-reduce' else 1
                    busy[link] = busy.get(link, 0) + rounds / len(group)
                    at[axis] = (at[axis] + (1 if forward else -1)) % size
    return max(busy.values(), default=0)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(4, 4), (2, 8), (8,), (4, 2, 2)]),
    st.booleans(),
    st.sampled_from([2, 4, 8]),
    st.sampled_from(['all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all']),
    st.randoms(use_true_random=False),
)
def test_no_bound_is_above_what_a_schedule_needs(sizes, wraps, n, kind, random):
    devices = list(range(math.prod(sizes)))
    random.shuffle(devices)
    groups = np.reshape(devices, (-1, n))
    chip = dataclasses.replace(V5E, torus=len(sizes), wraps_at=2 if wraps else 100, link=1e6)
    network = Network(tpus(*sizes), chip)
    first = collective(kind, groups, 10**6)
    busy = {}
    assert 0 < network.seconds(first) <= loads(network, kind, groups, busy) * (1 + 1e-9)
    random.shuffle(devices)
    groups = np.reshape(devices, (-1, 2))
    other = collective('reduce-scatter', groups, 10**6)
    both = loads(network, 'reduce-scatter', groups, busy)
    assert network.seconds(first) <= network.seconds(first, other) <= both * (1 + 1e-9)


# --- chips ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('kind', 'name'),
    [
        ('TPU v4', 'TPU v4'),
        ('TPU v4 lite', None),
        ('TPU v5 lite', 'TPU v5e'),
        ('TPU v5', 'TPU v5p'),
        ('TPU v6 lite', 'TPU v6e'),
        ('TPU7x', 'TPU7x'),
        ('NVIDIA A100-SXM4-40GB', 'A100 40GB'),
        ('NVIDIA A100-SXM4-80GB', 'A100 80GB'),
        ('NVIDIA A100-PCIE-40GB', None),  # not every GPU reaches every other over NVLink
        ('NVIDIA H100 80GB HBM3', 'H100'),
        ('NVIDIA H100 PCIe', None),
        ('NVIDIA H200', 'H200'),
        ('NVIDIA B200', 'B200'),
        ('NVIDIA B300 SXM6 AC', 'B300'),
        ('NVIDIA GB200', 'GB200'),
        ('NVIDIA GB300', 'GB300'),
        ('NVIDIA GH200 480GB', None),
        ('NVIDIA RTX PRO 6000 Blackwell Server Edition', 'RTX PRO 6000'),
        ('NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition', None),
        ('cpu', None),
    ],
)
def test_chips_of_devices(kind, name):
    chip = find_chip(kind)
    assert (chip and chip.name) == name


@pytest.mark.parametrize(
    ('name', 'dtype', 'rate'),
    [
        ('TPU v5e', 'bf16', 197e12),
        ('TPU v5e', 'f32', 197e12),
        ('TPU v5e', 's8', 394e12),
        ('TPU v5e', 'f8e4m3fn', 394e12),  # unknown: as fast as the fastest
        ('H100', 'f32', 494.7e12),
        ('H100', 'f16', 989.5e12),
        ('H100', 'f8e5m2', 1979e12),
        ('B200', 'f4e2m1fn', 9e15),
        ('GB200', 'bf16', 2.5e15),
        ('GB300', 'f4e2m1fn', 15e15),
        ('GB300', 's8', 167e12),
        ('RTX PRO 6000', 'f32', 252e12),
    ],
)
def test_rates_by_dtype(name, dtype, rate):
    assert as_chip(name).rate(dtype) == rate


@pytest.mark.parametrize(
    ('seconds', 'text'),
    [
        (10.84, '10.8 s'),
        (0.0018, '1.8 ms'),
        (0.0009999, '1 ms'),
        (2e-5, '20 us'),
        (3e-9, '3 ns'),
        (0, '0 ns'),
    ],
)
def test_seconds_as_text(seconds, text):
    assert format_seconds(seconds) == text


# --- explain --------------------------------------------------------------------------------------

MESH = mesh_of(data=2, tensor=4)


@sharded('b@data x', 'x y@tensor', 'y@tensor z', mesh=MESH)
def mlp(x, w_in, w_out):
    return jax.nn.relu(x @ w_in) @ w_out


ARGUMENTS = struct(1024, 512), struct(512, 2048), struct(2048, 512)


def test_cpus_have_no_bounds():
    report = explain(mlp, *ARGUMENTS)
    assert (report.chip, report.bounds, report.memory.capacity) == (None, (), None)
    assert 'lower bounds' not in str(report)


def test_bounds_of_a_chip_that_is_given():
    """Each device: a 512 x 512 block of x, a quarter of both weights, half of the result."""
    report = explain(mlp, *ARGUMENTS, chip='H100')
    flops = 2 * 512 * 512 * 512 * 2
    bounds = {bound.resource: bound for bound in report.bounds}
    assert report.chip == 'H100'
    # the CPU backend multiplies bf16 in f32: it may have been either
    assert bounds['compute'].seconds == pytest.approx(flops / 989.5e12)
    assert bounds['HBM'].seconds == 4 * 4 * 512 * 512 / 3.4e12
    network = bounds['network']
    assert (network.along, network.exposed) == ('tensor', None)
    # the switches can sum, so the sum arrives once
    assert network.seconds == pytest.approx(4 * 512 * 512 / 450e9)
    assert report.bounds.largest is network
    assert str(network) == 'network along tensor at least 2.33 us'
    assert 'network along tensor at least 2.33 us (the largest)' in str(report)
    assert report.memory.capacity == 81008 * 2**20
    assert report.to_dict()['bounds'][0]['resource'] == 'compute'


def test_chips_of_the_user():
    chip = Chip('ours', {'bf16': 1e6}, memory=2**20, memory_bandwidth=1e12, link=1e12)
    report = explain(mlp, *ARGUMENTS, chip=chip)
    assert report.bounds.largest.seconds == pytest.approx(report.flops / 1e6)
    (finding,) = (f for f in report.findings if f.kind == 'does not fit')
    total = report.memory.total
    assert finding.text == (
        f'the program needs {total / 2**20:.1f} MiB of memory, as compiled for a CPU, but a device '
        'has only 1.0 MiB'
    )


GROUPED = [
    # spatial size, kernel size, groups, features per group, stride, padding, dtype
    ((14, 14), 7, 32, 1, 1, 'SAME', np.float32),
    ((14, 14), 3, 32, 1, 2, 'SAME', np.float32),
    ((64,), 4, 64, 1, 1, [(3, 0)], np.float32),  # causal, as in Mamba
    ((64,), 4, 64, 1, 1, [(3, 0)], jnp.bfloat16),
    ((64,), 4, 2, 1, 1, 'SAME', np.float32),
    ((14, 14), 7, 32, 2, 1, 'SAME', np.float32),
    ((14, 14), 3, 8, 8, 1, 'SAME', np.float32),
]


@pytest.mark.parametrize(
    ('axis', 'case'),
    [
        *((None, case) for case in GROUPED),
        *((axis, case) for axis in ('batch', 'channels') for case in GROUPED[:3:2]),
    ],
)
def test_flops_of_grouped_convolutions(axis, case):
    """The CPU compiler computes the weight gradient for all pairs of groups."""
    size, k, groups, per_group, stride, pad, dtype = case
    n = len(size)
    letters = 'NWC' if n == 1 else 'NHWC', 'WIO' if n == 1 else 'HWIO', 'NWC' if n == 1 else 'NHWC'

    def convolve(x, w):
        options = {'dimension_numbers': letters, 'feature_group_count': groups}
        return jax.lax.conv_general_dilated(x, w, (stride,) * n, pad, **options)

    def step(w, x):
        return jax.grad(lambda w: (convolve(x, w) ** 2).sum())(w)

    channels = groups * per_group
    x_shape, w_shape = (4, *size, channels), (*(k,) * n, per_group, channels)
    # with ones, each multiplication adds 1
    products = np.asarray(convolve(jnp.ones(x_shape), jnp.ones(w_shape)), np.float64).sum()
    mesh = mesh_of(x=2)
    last = P(*(None,) * (n + 1), 'x')
    x_spec = {'batch': P('x'), 'channels': last, None: P()}[axis]
    w_spec = last if axis == 'channels' else P()
    x = jax.ShapeDtypeStruct(x_shape, dtype, sharding=NamedSharding(mesh, x_spec))
    w = jax.ShapeDtypeStruct(w_shape, dtype, sharding=NamedSharding(mesh, w_spec))
    report = explain(step, w, x, chip='TPU v5e')
    # the forward pass and the gradient, with 2 flops for each product
    expected = 2 * 2 * products / (2 if axis else 1)
    assert report.flops == expected
    assert report.bounds[0].seconds == pytest.approx(expected / 197e12)


def test_a_sum_of_a_convolution_is_not_a_mask():
    x, w = jnp.ones((1, 8, 16)), jnp.ones((4, 16, 32))

    def f(x, w):
        y = jax.lax.conv_general_dilated(
            x, w, (1,), 'VALID', dimension_numbers=('NWC', 'WIO', 'NWC')
        )
        return jnp.where(jnp.arange(32) == 3, y, 0).sum(1)

    report = explain(f, x, w)
    assert report.flops == 2 * 5 * 32 * 4 * 16


def test_each_resource_has_one_bound():
    text = str(explain(mlp, *ARGUMENTS, chip='TPU v5e'))
    assert text.count('at least') == 3


@pytest.mark.parametrize(
    ('exposed', 'text'),
    [
        (None, ''),
        (0, ', none exposed'),
        (2.0, ', exposed'),
        (0.5, ', of which 500 ms exposed'),
    ],
)
def test_communication_that_overlaps_is_marked(exposed, text):
    bound = Bound('network', 'tensor', 2.0, exposed)
    assert str(bound) == f'network along tensor at least 2 s{text}'


def test_bounds_of_a_program_for_gpus():
    """As JAX's CUDA plugin compiles it for 8 GPUs."""
    text = (Path(__file__).parent / 'hlo' / 'gpu_8-shardy-0.12.0.1.txt').read_text()
    start = text.index('HloModule jit_product_scattered')
    graph = Graph(HloModule(text[start : text.index('\nHloModule ', start)]))
    (scatter,) = find_collectives(graph)
    devices = [SimpleNamespace(id=i, platform='gpu') for i in range(8)]
    hbm, network = find_bounds(
        H100, devices, graph, (), [dataclasses.replace(scatter, along='model')]
    )

    # terms of 64 x 256 sums, of which each of the 4 GPUs keeps a quarter; not asynchronous
    assert network.seconds == network.exposed == pytest.approx(3 / 4 * 4 * 64 * 256 / 450e9)
    assert hbm.seconds == pytest.approx(4 * (64 * 32 + 32 * 256 + 16 * 256) / 3.4e12)


# --- programs as text -----------------------------------------------------------------------------

PROGRAM = """HloModule jit_f, num_partitions=1

%fused (p0: f32[1000,8], p1: s32[]) -> f32[1,8] {
  %p0 = f32[1000,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %row = f32[1,8]{1,0} dynamic-slice(%p0, %p1, %zero), dynamic_slice_sizes={1,8}
}

%update (c: f32[500,8], r: f32[1,8], i: s32[]) -> f32[500,8] {
  %c = f32[500,8]{1,0} parameter(0)
  %r = f32[1,8]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  ROOT %new = f32[500,8]{1,0} dynamic-update-slice(%c, %r, %i, %z)
}

%body (s: (s32[], f32[4,8,8], f32[1,8])) -> (s32[], f32[4,8,8], f32[1,8]) {
  %s = (s32[], f32[4,8,8]{2,1,0}, f32[1,8]{1,0}) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %layers = f32[4,8,8]{2,1,0} get-tuple-element(%s), index=1
  %h = f32[1,8]{1,0} get-tuple-element(%s), index=2
  %o = s32[] constant(0)
  %layer = f32[1,8,8]{2,1,0} dynamic-slice(%layers, %n, %o, %o), dynamic_slice_sizes={1,8,8}
  %w = f32[8,8]{1,0} bitcast(%layer)
  %wide = f32[64,64]{1,0} broadcast(%o), dimensions={}, metadata={op_name="jit(f)/wide"}
  %y = f32[1,8]{1,0} dot(%h, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %one = s32[] constant(1)
  %next = s32[] add(%n, %one)
  ROOT %t = (s32[], f32[4,8,8]{2,1,0}, f32[1,8]{1,0}) tuple(%next, %layers, %y)
}

%condition (s: (s32[], f32[4,8,8], f32[1,8])) -> pred[] {
  %s.1 = (s32[], f32[4,8,8]{2,1,0}, f32[1,8]{1,0}) parameter(0)
  %n.1 = s32[] get-tuple-element(%s.1), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%n.1, %four), direction=LT
}

ENTRY %main (table: f32[1000,8], cache: f32[500,8]) -> (f32[1,8], f32[500,8]) {
  %table = f32[1000,8]{1,0} parameter(0)
  %cache = f32[500,8]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %w.1 = f32[4,8,8]{2,1,0} parameter(3)
  %u = f32[9]{0} parameter(4)
  %x = f32[1,8]{1,0} fusion(%table, %i.1), kind=kLoop, calls=%fused
  %fast = f32[99,99]{1,0:T(8,128)S(1)} broadcast(%i.1), dimensions={}
  %big = f32[32,64]{1,0} broadcast(%i.1), dimensions={}, metadata={op_name="jit(f)/big"}
  %first = s32[] constant(0)
  %init = (s32[], f32[4,8,8]{2,1,0}, f32[1,8]{1,0}) tuple(%first, %w.1, %x)
  %loop = (s32[], f32[4,8,8]{2,1,0}, f32[1,8]{1,0}) while(%init), condition=%condition, body=%body
  %y.1 = f32[1,8]{1,0} get-tuple-element(%loop), index=2
  %cache.1 = f32[500,8]{1,0} fusion(%cache, %y.1, %i.1), kind=kLoop, calls=%update
  %same = f32[4,8,8]{2,1,0} get-tuple-element(%loop), index=1
  ROOT %r = (f32[1,8], f32[500,8], f32[9], f32[4,8,8]) tuple(%y.1, %cache.1, %u, %same)
}
"""


def test_the_fewest_bytes_of_hbm_traffic():
    """Reads of the layers, a row of the table and the number, and the write of the result.

    Not the cache that is updated, nor layers and arguments that are returned unchanged.
    """
    assert min_hbm_bytes(Graph(HloModule(PROGRAM))) == 4 * (4 * 8 * 8) + 4 * 8 + 4 + 4 * 8


def test_largest_temporaries():
    found = largest_temporaries(Graph(HloModule(PROGRAM)), 2)
    assert [(array.array, array.bytes, array.op_name) for array in found] == [
        ('f32[64,64]', 4 * 64 * 64, 'jit(f)/wide'),
        ('f32[32,64]', 4 * 32 * 64, 'jit(f)/big'),
    ]


@pytest.mark.parametrize(
    ('op_name', 'expected'),
    [
        ('jit(f)/transpose(jvp(loss))/dot_general', ['dot_general']),
        ('jit(f)/transpose(jvp())/(dot_general:reduce_sum)', ['dot_general', 'reduce_sum']),
        ('(jit(f)/add:jit(f)/(mul:jit(g)/reduce_sum))', ['add', 'mul', 'reduce_sum']),
        ('jit(f)/(mul:add:mul)', ['mul', 'add']),
        ('copy', ['copy']),
    ],
)
def test_operations_that_xla_combines(op_name, expected):
    assert operations(op_name) == expected


def test_temporaries_have_their_lines():
    @jax.jit
    def f(x):
        y = jnp.sort(x, axis=0)
        return y @ y

    report = explain(f, struct(600, 600))
    files = {row.source.rpartition(':')[0] for row in report.temporaries if row.source}
    assert files == {__file__}
    assert 'largest temporaries' in str(report)
