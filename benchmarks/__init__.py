"""Benchmarks: times of dispatch and combine, compared with the links' floor and with other libraries.

`python -m benchmarks` runs on one device, `mpirun -n N python -m mpi4py -m benchmarks --against nccl` on N GPUs.
`--quick` runs only the shapes that have targets. `python -m benchmarks table FILE.json` makes README's table and
`figure FILE.json` its picture, `aims FILE.json` compares results with the targets, `merge` joins files, `compile`
compiles a run's kernels in advance, `cpu` times the reference and the simulator.

How a number is measured. One iteration of a phase is: write a buffer larger than the L2 cache; meet all ranks on the
device (startline.py), so that neither the hosts' skew nor the launch is counted; CUDA event; the phase; CUDA event.
The slowest rank gives the time of an iteration. The row shows median, 20th and 80th percentile over iterations. Bytes
are the payload bytes that the busiest rank sends to or receives from other ranks: a token's once for each rank, or,
for combine of pairs and their plain dispatch, once for each of its experts. The floor is these bytes over the
peer-write bandwidth of a plain copy kernel, measured in the same run (link.py).

| module | what |
|---|---|
| shapes.py, traffic.py | sizes, formats, routings; routing drawn from a seed, and its bytes between ranks |
| plan.py | the contenders, shapes and sections that the options choose |
| worlds.py | the ranks of a run, and the stream that is measured |
| clock.py, startline.py | events around a phase; starting the ranks together, with a cold L2 |
| link.py | the bandwidth for the floor |
| pairs.py, rows.py, memory.py | our contenders: the pairs kernels, and fused_a2a's; their arrays |
| torch_peer.py, nccl.py, deepep.py | other libraries in the same run |
| peers.py | results of other libraries, measured earlier |
| graph.py | a contender's phases captured into CUDA graphs |
| compiling.py | compiles all kernels in advance, in many processes |
| run.py, measure.py | runs a contender's iterations and makes rows |
| host_time.py | host time of calls, and the host's speed at that time |
| targets.py, aims.py | the targets; a table of targets and results |
| table.py, results.py, readme_table.py, figure.py | rows as terminal output, file, README table, picture |
| pages.py | puts tables into pages |
| cpu.py | reference and simulator |

notes/ records decisions and everything tried.
"""
