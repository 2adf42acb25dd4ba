"""Tests for implementations of kvoffload's contracts, in kvoffload and in other projects.

- ``reference``: simple models of managers, to compare with.
- ``conformance``: one pytest class per contract (needs pytest). Subclass it and construct your implementation::

      from kvoffload.testing.conformance import ManagerConformance

      class TestMyManager(ManagerConformance):
          def make_manager(self, num_blocks):
              return MyManager(num_blocks)

- ``stateful``: a state machine that runs a manager and its reference side by side, by Hypothesis or at random
  (needs hypothesis).
- ``tier_conformance``: the same for tiers (needs pytest).
- ``secondary_tier_conformance``: the same for secondary tiers of vLLM's own offloading (needs pytest and vLLM).
  ``vllm_servers``: vLLM's scheduler half with such a tier, without an engine.

Only ``reference`` is imported with the package; import the others by name.
"""

from __future__ import annotations

import sys

from kvoffload.testing.reference import ReferenceLRUManager

if "pytest" in sys.modules:  # a failing assert of a suite then shows the values that it compared
    sys.modules["pytest"].register_assert_rewrite(
        "kvoffload.testing.conformance",
        "kvoffload.testing.tier_conformance",
        "kvoffload.testing.secondary_tier_conformance",
    )

__all__ = ["ReferenceLRUManager"]
