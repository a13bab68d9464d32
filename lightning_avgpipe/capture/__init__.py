"""From a step function to its call graph: what is called, what flows, what could be cut."""
