"""Implementations that come with epmoe, by short name. Each module is imported at its first use."""

ADAPTERS = {
    "reference": "epmoe.check.adapters.reference:Reference",
    "reference_rows": "epmoe.check.adapters.reference:ReferenceRows",
    "reference_hybrid": "epmoe.check.adapters.reference:ReferenceHybrid",
    "kernels": "epmoe.check.adapters.kernels:Kernels",
    "fused_kernels": "epmoe.check.adapters.kernels:FusedKernels",
    "plain_kernels": "epmoe.check.adapters.kernels:PlainKernels",
    "rows": "epmoe.check.adapters.fused_a2a:Rows",
    "hybrid": "epmoe.check.adapters.fused_a2a:Hybrid",
    "mpi_kernels": "epmoe.check.adapters.over_mpi:Kernels",
    "mpi_fused_kernels": "epmoe.check.adapters.over_mpi:FusedKernels",
    "mpi_plain_kernels": "epmoe.check.adapters.over_mpi:PlainKernels",
    "mpi_rows": "epmoe.check.adapters.over_mpi:Rows",
    "mpi_hybrid": "epmoe.check.adapters.over_mpi:Hybrid",
    "nccl": "epmoe.check.adapters.nccl:AllToAll",
    "deepep": "epmoe.check.adapters.deepep:Rows",
    "deepep_low_latency": "epmoe.check.adapters.deepep:LowLatency",
}
OWN = ("kernels", "fused_kernels", "rows", "hybrid")  # the default of `epmoe check`
