"""Weights: the numbers a description stands for are fixed for ever, and are what the description says."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from fixtures.weights import Bell, Diagonal, Ramp, Tensor


def test_the_numbers_are_the_same_on_every_machine_and_numpy() -> None:
    values = Tensor("pinned", (3, 64), Bell(0.125)).values(seed=1)
    digest = hashlib.sha256(values.astype("<f4").tobytes()).hexdigest()
    assert digest == "aeb5bb07ff558c65a86f9680e2173e415ed6b17ef2173021e19622464f98bc24", (
        "raise WEIGHTS_VERSION when this is meant to change"
    )


def test_a_bell_has_its_mean_and_deviation_and_no_correlation_between_tensors() -> None:
    a, b = (Tensor(name, (400, 500), Bell(2.0)).values(seed=1).ravel() for name in ("a", "b"))
    assert abs(a.mean()) < 0.02
    assert a.std() == pytest.approx(2.0, rel=0.01)
    assert abs(float(np.corrcoef(a, b)[0, 1])) < 0.01


def test_silent_rows_are_zero_in_every_matrix_of_a_stack() -> None:
    values = Tensor("stack", (2, 5, 3), Bell(1.0, silent=2)).values(seed=1)
    assert not values[:, :2].any()
    assert values[:, 2:].all()


def test_ramps_and_diagonals() -> None:
    assert Tensor("ramp", (3, 1), Ramp(-1.0, 1.0)).values(seed=1).tolist() == [[-1.0], [0.0], [1.0]]
    assert Tensor("one", (1,), Ramp(0.5, 9.0)).values(seed=1).tolist() == [0.5]
    assert Tensor("router", (2, 3), Diagonal(4.0)).values(seed=1).tolist() == [[4.0, 0.0, 0.0], [0.0, 4.0, 0.0]]
