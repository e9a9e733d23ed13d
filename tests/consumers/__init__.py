"""What other systems make of folders that ``grouped.checkpoint`` writes: run by ``.ci/consumers``."""
