"""Tuning: predict time and memory of settings from a profile, and search the best one within the memory limit."""
