"""The ops of mixtures of experts: routing, gather, activation and combine."""
