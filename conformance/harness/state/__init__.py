"""Sequence states as bytes: parse a blob of any build, count it, compare two layer by layer, edit rows in place,
splice two, make one longer.
"""

from .blob import SequenceFile, is_sequence_file, parse, split_file
from .census import Census, census
from .compare import Difference, LayerComparison, PartDeviation, at_positions_of, compare, first_difference
from .edit import lengthened, part, splice
from .sequence import (
    AttentionCache,
    AttentionLayer,
    BlobError,
    Cells,
    LayerMap,
    Layout,
    RecurrentCache,
    RecurrentLayer,
    Rows,
    SequenceState,
)

__all__ = [
    "AttentionCache",
    "AttentionLayer",
    "BlobError",
    "Cells",
    "Census",
    "Difference",
    "LayerComparison",
    "LayerMap",
    "Layout",
    "PartDeviation",
    "RecurrentCache",
    "RecurrentLayer",
    "Rows",
    "SequenceFile",
    "SequenceState",
    "at_positions_of",
    "census",
    "compare",
    "first_difference",
    "is_sequence_file",
    "lengthened",
    "parse",
    "part",
    "splice",
    "split_file",
]
