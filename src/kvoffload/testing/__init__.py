"""What proves an implementation, ours or a stranger's.

- ``reference``: the plainest models of the managers and the filter, to compare with.
- ``conformance``: one pytest class a contract (needs pytest). Subclass it and say how to make yours::

      from kvoffload.testing.conformance import ManagerConformance

      class TestMyManager(ManagerConformance):
          def make_manager(self, num_blocks):
              return MyManager(num_blocks)

- ``stateful``: a state machine that runs a manager and its reference side by side, by Hypothesis or at random
  (needs hypothesis).
- ``tier_conformance``: the same for tiers (needs pytest). ``tiers``: a plain tier in memory, and an executor whose
  turns are chosen by a seed. ``storage``: a simulated disk, and faults for any.
- ``engine``: a small paged engine that checks every byte it attends to. ``faults``: transfers that misbehave.
- ``simulation``: servers that live, die and start again on a disk that fails; ``run_simulations(seeds, progress)``, or
  ``python -m kvoffload.testing simulate --seeds N``.

Only ``reference`` is imported with the package; the others are imported by name.
"""

from __future__ import annotations

import sys

from kvoffload.testing.reference import ReferenceARCManager, ReferenceFilter, ReferenceLRUManager

if "pytest" in sys.modules:  # so that a failing assert of a suite shows the values it compared
    sys.modules["pytest"].register_assert_rewrite("kvoffload.testing.conformance", "kvoffload.testing.tier_conformance")

__all__ = ["ReferenceARCManager", "ReferenceFilter", "ReferenceLRUManager"]
