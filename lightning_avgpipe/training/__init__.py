"""Training: the deployment of a module on processes, parallel pipelines, replicas, clipping, loss scale and state."""
