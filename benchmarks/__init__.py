"""Benchmarks: what dispatch and combine cost, beside the links' floor and beside other libraries.

`python -m benchmarks` on one device, `mpirun -n N python -m mpi4py -m benchmarks --against nccl` on N GPUs; with
`--quick` only what there are targets for. `python -m benchmarks table FILE.json` and `figure FILE.json` make README's
table and picture, `aims FILE.json` the aims beside what is reached, `merge` joins files, `compile` compiles a run's
kernels in advance, `cpu` times the reference and the simulator.

How a number is made. One iteration of a phase is: write a buffer larger than the L2 cache; meet all ranks on the device
(startline.py), so that neither the hosts' skew nor the launch is counted; CUDA event; the phase; CUDA event. The time
of an iteration is that of its slowest rank; the row shows median, 20th and 80th percentile over iterations. Bytes are
payload bytes that the routing sends to other ranks (what the busiest rank sends or receives), a token's once to a rank,
or, for combine of pairs and their plain dispatch, once for each of its experts. The floor is these bytes over
the peer-write bandwidth of a plain copy kernel measured in the same run (link.py).

| module | what |
|---|---|
| shapes.py, traffic.py | sizes, formats, routings; routing drawn from a seed, and its bytes between ranks |
| plan.py | contenders at shapes, by section, as the options choose them |
| worlds.py | the ranks of a run, and the stream that everything is measured on |
| clock.py, startline.py | events around a phase; ranks that begin together, with a cold L2 |
| link.py | the bandwidth that the floor is made from |
| pairs.py, rows.py, memory.py | our contenders: the page kernels, and fused_a2a's; the arrays that they are given |
| torch_peer.py, nccl.py, deepep.py | other libraries in the same run |
| peers.py | constants of others, measured before |
| graph.py | a contender's phases captured into CUDA graphs |
| compiling.py | all kernels compiled in advance, by many processes |
| run.py, measure.py | iterations of a contender into rows |
| host_time.py | what calls cost the host, and how fast the host was just then |
| targets.py, aims.py | what the kernels are to reach; that beside what is reached, as a table |
| table.py, results.py, readme_table.py, figure.py | rows on the terminal, in a file, in README, in a picture |
| pages.py | tables put into pages |
| cpu.py | reference and simulator |

notes/ says what was expected, and what came out.
"""
