"""What the scripts beside this folder share. Importing it makes a source checkout importable without installation."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
