"""Execute pipelines without Lightning: stages, their programs, the replay of the step function, and the executor."""
