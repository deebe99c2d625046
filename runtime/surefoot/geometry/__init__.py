"""Computes the location of tensor elements: boxes, blocks, chunks, shares.

Pure integer arithmetic without any framework. `format` and `state` use it to cut state into a stream, `restore` to plan
reads.
"""

from surefoot.geometry.box import Box as Box
from surefoot.geometry.box import Tiling as Tiling
from surefoot.geometry.box import block_shape as block_shape
