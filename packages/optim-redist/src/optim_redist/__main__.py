"""``python -m optim_redist``, also under torchrun."""

import sys

from optim_redist.cli import main

sys.exit(main())
