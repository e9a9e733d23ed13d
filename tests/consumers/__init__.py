"""Ask other systems about folders that ``grouped.checkpoint`` writes: run by ``.ci/consumers``."""
