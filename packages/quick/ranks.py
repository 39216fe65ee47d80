"""What each rank would do before it interprets its first kernels, done once for all: ``conftest.py`` preloads it.

Triton's interpreter reads the source of a kernel when it is called first, and imports Gluon for the types of arguments.
"""

import sys
from importlib import import_module

from triton.runtime.interpreter import InterpretedFunction

from quick import interpreter

for name in ("optim_kernels.adamw_kernels", "optim_kernels.functional._muon_batch_plan", "triton.experimental.gluon"):
    import_module(name)
interpreter.install()
for module in [module for name, module in sys.modules.items() if name.startswith("optim_kernels.")]:
    for value in vars(module).values():
        if isinstance(value, InterpretedFunction):
            value.rewrite()
