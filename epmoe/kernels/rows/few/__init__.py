"""Ways of small batches, each a function that a kernel calls first: nothing is waited for before rows are sent.

lamport.py: rows whose words say by themselves that they have come; dispatch.py and combine.py are made of them.
by_expert.py: expert-major dispatch, with places.py.
"""
