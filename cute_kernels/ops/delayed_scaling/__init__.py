"""The op that updates the scales of delayed scaling, and its launcher."""
