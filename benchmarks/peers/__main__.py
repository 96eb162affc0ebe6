"""One rank in an environment of its own, started by ``pair.py``: requests come through the pipe of a descriptor.

python -m peers RANK WORLD FILE DESCRIPTOR MODULE SHAPE COMPILER
"""

import sys
from multiprocessing.connection import Connection

from .rank import serve

rank, world, file, descriptor, module, shape, compiler = sys.argv[1:]
serve(int(rank), int(world), file, Connection(int(descriptor)), module, shape, compiler)
