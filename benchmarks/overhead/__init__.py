"""Overhead of an iteration: the program, and the tables of steps, stages and delivery."""
