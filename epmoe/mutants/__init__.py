"""Is every synchronisation of the kernels needed, and would its loss be noticed? `epmoe mutants` answers.

tokens.py weakens, narrows or deletes every synchronising token of epmoe/kernels, one at a time. The edited kernels
(edited_kernels.py) run in small worlds (worlds.py, world_run.py, rows_run.py) under the race detector. The run must
notice the edit (hunt.py). harmless.py lists the edits that change nothing, each with its reason. public_faults.py puts
four faults of public kernels into ours; they must be rejected (README.md).
"""
