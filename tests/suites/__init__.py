"""Suites and reference models of contracts that no setting replaces, and of vLLM's secondary tiers."""

import pytest

pytest.register_assert_rewrite("tests.suites.conformance", "tests.suites.secondary_tier_conformance")
