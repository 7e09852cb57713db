"""Saved findings: what a regression file holds, reading and writing it, and where the files lie. Torch-free."""

from attnfuzz.corpus.folder import DEFAULT_FOLDER as DEFAULT_FOLDER
from attnfuzz.corpus.folder import regression_files as regression_files
from attnfuzz.corpus.folder import regression_name as regression_name
from attnfuzz.corpus.folder import write_regression as write_regression
from attnfuzz.corpus.reading import RegressionError as RegressionError
from attnfuzz.corpus.reading import decode_regression as decode_regression
from attnfuzz.corpus.reading import load_regression as load_regression
from attnfuzz.corpus.regression import MAX_PRECEDING as MAX_PRECEDING
from attnfuzz.corpus.regression import Environment as Environment
from attnfuzz.corpus.regression import FindingRecord as FindingRecord
from attnfuzz.corpus.regression import Regression as Regression
from attnfuzz.corpus.regression import current_environment as current_environment
from attnfuzz.corpus.regression import encode_regression as encode_regression
