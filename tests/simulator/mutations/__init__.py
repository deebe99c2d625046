"""Broken rules, one at a time, and how each is put into a run: what the tests of the oracle's eyes are made from.

Either a rule of a model is off (`Rules`), or one decision is wrapped (`Decisions`) or replaced where it stands, for the
time of a `with` block. Nothing here is imported by the simulator itself. `python -m bench mutate` runs them all.
"""

from simulator.mutations.ending import ENDING
from simulator.mutations.healing import HEALING
from simulator.mutations.joining import JOINING
from simulator.mutations.keeping import KEEPING
from simulator.mutations.leaving import LEAVING
from simulator.mutations.liveness import LIVENESS
from simulator.mutations.models import MODELS
from simulator.mutations.mutation import Mutation as Mutation
from simulator.mutations.mutation import broken as broken
from simulator.mutations.narrowing import NARROWING
from simulator.mutations.records import RECORDS
from simulator.mutations.restore import RESTORE
from simulator.mutations.sickening import SICKENING
from simulator.mutations.slowing import SLOWING
from simulator.mutations.sparing import SPARING
from simulator.mutations.spreading import SPREADING
from simulator.mutations.talk import TALK

MUTATIONS = (
    *MODELS,
    *RESTORE,
    *KEEPING,
    *TALK,
    *LIVENESS,
    *LEAVING,
    *SPARING,
    *SICKENING,
    *JOINING,
    *SLOWING,
    *HEALING,
    *NARROWING,
    *RECORDS,
    *ENDING,
    *SPREADING,
)
