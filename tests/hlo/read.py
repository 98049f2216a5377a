"""What the package reads in programs: here tests meet its private readers."""

import jax
import numpy as np

from einshard._check.tolerance import largest_rounding
from einshard._chips.table import as_chip
from einshard._explain.roles import Payloads
from einshard._program.cost.network import Network
from einshard._program.hlo.find_collectives import find_collectives, read_collectives
from einshard._program.hlo.flops import find_products
from einshard._program.hlo.graph import Graph
from einshard._program.hlo.hbm_traffic import find_copied, min_hbm_bytes
from einshard._program.hlo.queries import Origins, output_uses
from einshard._program.hlo.slices import find_gather, find_reshards, find_sliced_sum
from einshard._program.hlo.target_collectives import target_collectives
from einshard._program.hlo.temporaries import largest_temporaries
from einshard._program.hlo.text import HloModule
from einshard._program.jaxpr.batch_axes import batch_axes


def graph_of(program):
    """The graph of a program: its text, or what JAX compiled."""
    return Graph(HloModule(program if isinstance(program, str) else program.as_text()))


def collectives_of(program):
    return read_collectives(program if isinstance(program, str) else program.as_text())


def read_all(text):
    """Reads all that `explain` reads from the text of a program. Returns the collectives."""
    graph = graph_of(text)
    inputs = [(f'x{i}', 'float32') for i in sorted(graph.parameters)]
    payloads = Payloads(graph, inputs, {i: f'result/{i}' for i in range(len(graph.outputs))})
    collectives = [payloads.of(c) for c in find_collectives(graph)]
    target_collectives(graph, collectives)
    find_reshards(graph, collectives)
    for c in collectives:
        find_gather(graph, c)
        find_sliced_sum(graph, c)
    min_hbm_bytes(graph)
    largest_temporaries(graph)
    list(find_products(graph))
    return collectives


def payloads_of(text, inputs, outputs):
    """The collectives with what they send, where `inputs` are the names of float32 arguments."""
    graph = graph_of(text)
    payloads = Payloads(graph, [(name, 'float32') for name in inputs], outputs)
    return [*map(payloads.of, find_collectives(graph))]


def outputs_from(text):
    """{argument: the numbers of the outputs that it reaches}, and the same of collectives."""
    graph = graph_of(text)
    uses = output_uses(graph)
    nodes = (*graph.parameters.values(), *(n for c in find_collectives(graph) for n in c.nodes))
    return {node.name: {*uses.get(node, ())} for node in nodes}


def origins_of(text, output):
    """The arguments that an output is made of, and whether also of other values."""
    return Origins().of(graph_of(text).outputs[output])


def reshards_of(text):
    graph = graph_of(text)
    return [*find_reshards(graph, [*find_collectives(graph)]).values()]


def flops_of(text):
    return [product.flops for product in find_products(graph_of(text))]


def hbm_bytes_of(program):
    return min_hbm_bytes(graph_of(program))


def copied_in(text):
    return [*find_copied(graph_of(text))]


def latency_of(collective, chip, devices):
    """Seconds of the latency of a collective on devices that may be stand-ins."""
    return Network(devices, as_chip(chip)).latency(collective)


def rounding_of(function, *args, platform='cpu'):
    """The rounding of the longest sum of a function on 8 devices."""
    return largest_rounding(jax.make_jaxpr(function)(*args).jaxpr, 8, platform)


def batch_axes_of(eqn, ins, results):
    """The axes along which each shard of the operands gives a shard of the results."""
    shapes = [*map(np.shape, ins)], [*map(np.shape, results)]
    return batch_axes(eqn.primitive.name, eqn.params, *shapes).values()
