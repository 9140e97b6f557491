"""Microbenchmarks: a few seconds in which the rates of a machine are measured."""
