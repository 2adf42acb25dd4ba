"""The demo: the same conversations through real vLLM without kvoffload, with it, after a restart, and with corrupted
bytes.

Only ``engine`` imports vllm: each act runs it in a child process.
"""
