"""Answers that must have a form, by the demo model with random sampling: what completes fits, whatever the schema."""

from __future__ import annotations

import pytest

from agentserve.cli.private_server import PrivateServer
from benchmarks.strict_output import run_many
from tests.budget import examples


def assert_all_fit(server: PrivateServer, seeds: range) -> None:
    outcomes = run_many(server, seeds)
    wrong = [o for o in outcomes if o.status not in ("completed", "incomplete")]
    assert not wrong
    assert sum(o.status == "completed" for o in outcomes) >= 0.6 * len(outcomes)


def test_answers_fit_their_random_schemas(server: PrivateServer) -> None:
    assert_all_fit(server, range(5000, 5000 + examples(24, 40)))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_thousand_answers_fit_their_random_schemas(server: PrivateServer) -> None:
    assert_all_fit(server, range(1000))
