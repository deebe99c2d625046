"""Copies live tensors into staging memory, mostly in the background of the training.

Called by `checkpointer`. Only this package decides on which thread or stream a copy runs.
"""

from surefoot.staging.host_copies import Arena as Arena
from surefoot.staging.host_copies import CopyOutcome as CopyOutcome
from surefoot.staging.host_copies import CopySource as CopySource
from surefoot.staging.host_copies import as_integer_elements as as_integer_elements
from surefoot.staging.host_copies import prepare_copies as prepare_copies
from surefoot.staging.stager import Stager as Stager
