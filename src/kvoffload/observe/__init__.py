"""What operators see.

- ``metrics``: counters and gauges.
- ``records``: one record per request that says what it found and why it missed, and summaries of records.
- ``server``: moves records to another process, over a local socket or through the log.
- ``spans``: OpenTelemetry spans of requests that have a trace.
- ``trace``: writes requests to a file that ``kvoffload.lab`` can replay.
"""
