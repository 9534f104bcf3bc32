"""Runs under the real supervisor on a real SLURM, with faults chosen by a seed and injected at events."""
