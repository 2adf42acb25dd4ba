"""Plain scripts that ``benchmarks.stores`` is compared with, a module for each. They verify nothing.

``python -m benchmarks.store_peers.NAME COUNT BYTES ...`` reads lines "put PREFIX N", "get PREFIX N" and "remove PREFIX
N" from its input, moves the values PREFIX/0 to PREFIX/N-1 of so many BYTES, and prints how many seconds that took.
"""
