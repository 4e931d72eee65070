"""Implementations that come with epmoe, by short name; each module is imported only when it is asked for."""

ADAPTERS = {
    "reference": "epmoe.check.adapters.reference:Reference",
    "reference_rows": "epmoe.check.adapters.reference:ReferenceRows",
    "kernels": "epmoe.check.adapters.kernels:Kernels",
    "fused_kernels": "epmoe.check.adapters.kernels:FusedKernels",
    "nccl": "epmoe.check.adapters.nccl:AllToAll",
    "deepep": "epmoe.check.adapters.deepep:Rows",
    "deepep_low_latency": "epmoe.check.adapters.deepep:LowLatency",
}
