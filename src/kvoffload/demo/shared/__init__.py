"""The demo of shared stores: two vLLM servers in two processes on one store, and what happens if the store fails.

Only ``memory`` imports mooncake, in a process of its own.
"""
