"""Systems: schedules, planners and callbacks beside the core, each in a folder that can be taken away.

A system imports the core and enters itself in the core's tables; the core imports no system by name. Whatever folder is
here is imported, and with a folder only its own options go.
"""

import importlib
import pkgutil

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
