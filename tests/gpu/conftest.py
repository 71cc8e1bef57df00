"""Every test here may name the matrix' formats."""

import pytest


@pytest.fixture(autouse=True)
def formats_of_the_matrix(windowed_formats):
    """Formats like "k4v4+w128" have kernels while a test runs."""
