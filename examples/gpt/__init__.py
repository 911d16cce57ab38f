"""The files here import each other by plain name, as scripts do; this makes `import examples.gpt.train` work too."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
