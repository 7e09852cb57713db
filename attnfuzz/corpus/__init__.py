"""Saved findings: what a regression file holds, reading and writing it, and where the files lie. Torch-free."""

from attnfuzz.corpus.folder import DEFAULT_FOLDER, regression_files, regression_name, write_regression
from attnfuzz.corpus.reading import RegressionError, decode_regression, load_regression
from attnfuzz.corpus.regression import (
    MAX_PRECEDING,
    Environment,
    FindingRecord,
    Regression,
    current_environment,
    encode_regression,
)

__all__ = [
    "DEFAULT_FOLDER",
    "MAX_PRECEDING",
    "Environment",
    "FindingRecord",
    "Regression",
    "RegressionError",
    "current_environment",
    "decode_regression",
    "encode_regression",
    "load_regression",
    "regression_files",
    "regression_name",
    "write_regression",
]
