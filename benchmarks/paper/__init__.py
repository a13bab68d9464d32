"""The workloads of AvgPipe's paper at a size for two cores, trained with AvgPipe and with other systems."""
