"""Rehearsals of other people's training runs, to compare with the memory that they measured."""
