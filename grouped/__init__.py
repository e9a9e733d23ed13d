"""What users hold: grouped tensors, recipes and modules."""
