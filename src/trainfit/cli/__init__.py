"""The command line: one file a verb, thin over the library. Importing it does not import torch."""
