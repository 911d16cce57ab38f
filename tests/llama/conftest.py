"""The examples as packages of the repository: `examples.llama`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
