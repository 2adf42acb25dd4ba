"""Copies between the blocks of a CUDA device and the host pool."""
