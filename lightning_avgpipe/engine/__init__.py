"""Execute pipelines: stages, their programs, replay of the step function, and the executor; without Lightning."""
