"""Host memory: ``pool`` holds the bytes of offloaded blocks, ``limits`` says how much memory there may be."""
