"""Kernels for pairs: dispatch sends (token, k) pairs to the owners of their experts; combine returns and sums the rows.

Read dispatch.py, which lists the steps, then send, message, signal, offsets, receive, few_tokens. For the way back read
combine.py, send_back, await_rows, reduce.
"""
