"""`epmoe mutants` checks that every synchronisation of the kernels is needed, and that a run notices if it is missing.

token_mutations.py weakens, narrows or deletes every synchronising token of epmoe/kernels, one at a time. The edited
kernels (edited_kernels.py) run in small worlds (worlds.py, world_run.py, rows_run.py) under the race detector. The run
must notice the edit (hunt.py). harmless.py lists the edits that change nothing, each with its reason. public_faults.py
puts four faults of public kernels into ours. They must be noticed too (README.md).
"""
