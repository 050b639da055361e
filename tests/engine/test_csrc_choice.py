"""Helpers or the caller alone, in simulated time: what the pool's choice loses on a busy machine, and how fast it learns."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "engine" / "csrc"
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include "choice.h"
static void kind(void *, int, int) {}
// Arguments: pairs of seconds and of what helpers cost, relative to the caller alone. Prints for each what the loops took.
int main(int count, char **words) {
  asv::ParallelChoice choice;
  for (int i = 1; i + 1 < count; i += 2) {
    double until = atof(words[i]) * 1e6, cost = atof(words[i + 1]), alone = 0, taken = 0;
    for (unsigned loop = 0; taken < until; ++loop) {
      double wall = 300 * (choice.parallel() ? cost * (0.8 + 0.1 * (loop % 5)) : 1.0);
      choice.record(kind, 300, wall);
      alone += 300;
      taken += wall;
    }
    printf("%f\\n", taken / alone);
  }
}
"""


@pytest.fixture(scope="module")
def simulate(tmp_path_factory: pytest.TempPathFactory):
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    place = tmp_path_factory.mktemp("choice")
    (place / "main.cpp").write_text(PROGRAM)
    command = [compiler, "-std=c++17", "-O1", f"-I{CSRC}", str(place / "main.cpp"), "-o", str(place / "main")]
    subprocess.run(command, check=True)

    def run(*phases: tuple[float, float]) -> list[float]:
        """phases: (seconds, cost of helpers); what each took relative to the caller alone."""
        words = [str(word) for phase in phases for word in phase]
        out = subprocess.run([str(place / "main"), *words], check=True, capture_output=True, text=True).stdout
        return [float(line) for line in out.split()]

    return run


@pytest.mark.parametrize("cost", [1.0, 1.2, 1.5, 2.0, 3.0, 8.0])
def test_helpers_that_do_not_pay_cost_next_to_nothing(simulate, cost):
    first, later = simulate((2, cost), (60, cost))
    assert later < 1.04
    assert first < 1.15


@pytest.mark.parametrize("cost", [0.5, 0.6, 0.8])
def test_helpers_that_pay_are_used(simulate, cost):
    _, later = simulate((2, cost), (60, cost))
    assert later < cost + 0.03


@pytest.mark.parametrize("busy", [1.5, 3.0, 8.0])
def test_a_core_that_becomes_free_is_used_again_within_seconds(simulate, busy):
    *_, after = simulate((5, 0.6), (20, busy), (5, 0.6), (5, 0.6))
    assert after < 0.63


def test_a_core_that_becomes_busy_is_given_up_within_half_a_second(simulate):
    _, soon, later = simulate((10, 0.6), (0.5, 3.0), (5, 3.0))
    assert later < 1.05
    assert soon < 1.9
