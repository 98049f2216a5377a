"""XLA flags with which the tests' programs compile quickly on CPU."""

import importlib.metadata

# without these, LLVM takes most of the tests' time; the HLO that tests read comes before LLVM
QUICK = '--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1'
# A small program compiles in 20 ms of CPU time instead of 100. A process ends at a flag that it
# does not know: this one is gone from JAX 0.12, and libtpu never had it.
WITHOUT_TPU = QUICK
if importlib.metadata.version('jaxlib').startswith('0.10.'):
    WITHOUT_TPU += ' --xla_cpu_use_fusion_emitters=false'


def simulating(n_devices):
    """The flag for this many CPU devices."""
    return f'--xla_force_host_platform_device_count={n_devices}'
