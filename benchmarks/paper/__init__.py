"""The workloads of AvgPipe's paper at a size for two cores, beside what else one could train them with."""
