"""Converts a program's state into named tensors and plain values, and back.

Used by `checkpointer` and by the adapters of other formats. Only this package handles modules and optimizers.
"""

from surefoot.state.entries import AllowedDifferences as AllowedDifferences
from surefoot.state.entries import Entry as Entry
from surefoot.state.entries import SavedTensor as SavedTensor
from surefoot.state.entries import dtype_from_name as dtype_from_name
from surefoot.state.entries import dtype_name as dtype_name
from surefoot.state.objects import read_values as read_values
from surefoot.state.program import Program as Program
from surefoot.state.save_plan import PieceRange as PieceRange
from surefoot.state.save_plan import SavePlan as SavePlan
from surefoot.state.save_plan import save_plan as save_plan
from surefoot.state.save_plan import structure_of as structure_of
from surefoot.state.tensor_locations import describe_flat as describe_flat
