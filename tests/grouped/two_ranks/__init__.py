"""Checks that two processes on the CPU run together, one module per subject.

``test_distributed`` and ``test_checkpoint_sharded`` start the processes with ``runner.launch``.
To run some checks by hand, start two processes, with ranks 0 and 1:
``python -m tests.grouped.two_ranks RANK FOLDER SUBJECT[,SUBJECT...] [CHECK...]``.
"""
