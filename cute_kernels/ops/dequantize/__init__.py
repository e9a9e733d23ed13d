"""The op that decodes one copy of a quantized tensor, and its launcher."""
