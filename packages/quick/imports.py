"""Imports after this one take a sixth less time, for none of what they load is looked through for garbage.

``conftest.py`` imports it first, and lets garbage be collected again once all tests are. The process that ranks start
from imports it first, too.
"""

import gc
import os

gc.disable()
os.register_at_fork(after_in_child=gc.enable)  # ranks collect their garbage
