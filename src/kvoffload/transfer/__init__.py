"""Copies between device blocks and host slots: ``inline`` on the CPU, ``cuda`` on a GPU, ``copies`` for both."""
