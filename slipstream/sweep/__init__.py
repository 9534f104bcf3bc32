"""Sweeps: what a sweep file says, the cells it stands for, what to start and stop, and what came out of it.

Pure: values in, values out; `report` and `draw` only write what they are given. Whoever starts runs is `tasks.sweep`.
"""
