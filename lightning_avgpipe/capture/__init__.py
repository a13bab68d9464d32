"""Record the call graph of a step function: its calls, the values that flow between them, and where it may be cut."""
