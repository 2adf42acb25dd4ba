"""The state machine of managers, its reference models, and the suite of vLLM's secondary tiers."""

import pytest

pytest.register_assert_rewrite("tests.suites.stateful", "tests.suites.secondary_tier_conformance")
