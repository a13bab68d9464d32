"""Verification: training's first iterations run plainly as well, and are compared by name.

Nothing here uses the captured step: the user's own ``training_step`` runs in a copy of the process, with autograd.
"""

from lightning_avgpipe.verify.subject import Subject
from lightning_avgpipe.verify.verifier import Verifier

__all__ = ["Subject", "Verifier"]
