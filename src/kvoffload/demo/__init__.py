"""The demo: the same conversations through real vLLM without kvoffload, with it, after a restart, and with corrupted
bytes.

Nothing here imports torch or vllm; each act runs ``kvoffload.vllm.demo_engine`` in a child process.
"""
