"""kvoffload beside other systems that keep KV caches in host memory, in real vLLM: ``make peers``."""
