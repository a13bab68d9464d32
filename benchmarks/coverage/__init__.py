"""Coverage: which models of other libraries train as they do without stages."""
