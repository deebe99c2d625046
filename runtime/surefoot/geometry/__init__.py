"""Computes where tensor elements lie: boxes, blocks, chunks, shares.

Pure arithmetic on whole numbers, no framework. Called by whatever cuts state into a stream (`format`, `state`) and by
whatever plans reads from one (`restore`).
"""

from surefoot.geometry.box import Box as Box
from surefoot.geometry.box import Tiling as Tiling
from surefoot.geometry.box import block_shape as block_shape
