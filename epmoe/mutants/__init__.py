"""Is every synchronisation of the kernels needed, and would its loss be noticed? `epmoe mutants` answers.

Every synchronising token of epmoe/kernels is weakened, narrowed or deleted, one at a time, mechanically (tokens.py);
the changed kernels (edited_kernels.py) run in small worlds (worlds.py, world_run.py, rows_run.py) under the race
detector, and the change must be noticed (hunt.py). What changes nothing is written down with its reason (harmless.py).
Four faults of public kernels are kept as variants of ours that must be rejected (public_faults.py, README.md).
"""
