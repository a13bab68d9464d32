"""Verification: the first iterations also run plainly, without a pipeline, and all results are compared by name.

Nothing here uses the captured step: the user's own ``training_step`` runs in a copy of the process, with autograd.
"""

from lightning_avgpipe.verify.subject import Subject
from lightning_avgpipe.verify.verifier import Verifier

__all__ = ["Subject", "Verifier"]
