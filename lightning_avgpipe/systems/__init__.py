"""Systems: what goes beyond AvgPipe, each in a package of its own that can be removed by deleting its folder.

Importing this package imports them all. A system imports the core, and registers itself where the core lets it: kinds
of actions (``schedule/kinds.py``) and checks of schedules (``schedule/rules.py``), named schedules
(``schedule/recipes.py``), weight policies (``schedule/policies.py``), parts of stages (``engine/stage.py``) and of
steps (``engine/pipeline.py``), sources of plans (``planning/planner.py``), and rules on options
(``strategy/combinations.py``). Freezing is a callback and survival the value of an option (``strategy/system.py``).
A system imports what it needs of the strategy's options only when it is used, because the options are built from what
is registered.
"""

import importlib
import pkgutil

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
