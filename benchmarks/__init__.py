"""Benchmarks: what dispatch and combine cost, beside the links' floor and beside other libraries.

`python -m benchmarks` on one device, `mpirun -n N python -m mpi4py -m benchmarks` on N GPUs; `python -m benchmarks
figure FILE.json` draws; `python -m benchmarks cpu` times the reference and the simulator.

How a number is made. One iteration of a phase is: write a buffer larger than the L2 cache; meet all ranks on the device
(startline.py), so that neither the hosts' skew nor the launch is counted; CUDA event; the phase; CUDA event. The time
of an iteration is that of its slowest rank; the row shows median, 20th and 80th percentile over iterations. Bytes are
payload bytes that the routing sends to other ranks (what the busiest rank sends or receives), whatever the kernel
moves. The floor is these bytes over the peer-write bandwidth of a plain copy kernel measured in the same run (link.py).

| module | what |
|---|---|
| shapes.py | sizes, formats, routings; the sets that are run |
| traffic.py | routing drawn from a seed, and its bytes between ranks |
| worlds.py | the ranks of a run, and the stream that everything is measured on |
| clock.py, startline.py | events around a phase; ranks that begin together, with a cold L2 |
| link.py | the bandwidth that the floor is made from |
| pairs.py, nccl.py, deepep.py | the contenders: the page kernels, torch's all_to_all_single with permute, DeepEP |
| graph.py | a contender's phases captured into CUDA graphs |
| measure.py | iterations of a contender into rows |
| table.py, results.py, figure.py | rows on the terminal, in a file, in a picture |
| cpu.py | reference and simulator |
"""
