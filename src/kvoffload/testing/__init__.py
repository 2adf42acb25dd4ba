"""Tests for what others plug into kvoffload, one pytest class per contract (needs pytest).

- ``conformance``: eviction policies. Subclass its class and construct your policy::

      from kvoffload.testing.conformance import PolicyConformance

      class TestMyPolicy(PolicyConformance):
          def make_policy(self, capacity):
              return MyPolicy(capacity)

- ``tier_conformance``: the same for tiers below host memory.
"""

from __future__ import annotations

import sys

if "pytest" in sys.modules:  # a failing assert of a suite then shows the values that it compared
    sys.modules["pytest"].register_assert_rewrite("kvoffload.testing.conformance", "kvoffload.testing.tier_conformance")
