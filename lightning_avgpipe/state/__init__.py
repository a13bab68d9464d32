"""The effects of user code: one walk over what it can see and change, one snapshot that compares and restores it."""
